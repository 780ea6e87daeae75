"""Segments on a disk: files with their checksums, an index, and the lock that keeps a second server out.

And files for what single slots held.
"""

from llamaslot.backend.disk.slot_files import SlotFiles
from llamaslot.backend.disk.store import DiskStore, fingerprint_of

__all__ = ["DiskStore", "SlotFiles", "fingerprint_of"]
