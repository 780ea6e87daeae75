"""Conversations on several workers behind a gateway, beside one large server."""
