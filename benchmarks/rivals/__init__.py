"""What nearfield is compared with, where the library itself has no such method."""
