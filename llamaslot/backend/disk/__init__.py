"""The disk tier: segments in verified files, an SQLite index, and a lock that keeps out a second server.

Also snapshots of single slots, in files that users name.
"""

from llamaslot.backend.disk.disk_store import DiskStore, fingerprint_of
from llamaslot.backend.disk.slot_files import SlotFiles

__all__ = ["DiskStore", "SlotFiles", "fingerprint_of"]
