"""OpenAI's Responses API: conversion of its request bodies to chat bodies."""
