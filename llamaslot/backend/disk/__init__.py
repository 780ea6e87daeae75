"""Segments on a disk: files with their checksums, an index, and the lock that keeps a second server out."""

from llamaslot.backend.disk.slots import SlotFolder
from llamaslot.backend.disk.store import DiskStore, weighed

__all__ = ["DiskStore", "SlotFolder", "weighed"]
