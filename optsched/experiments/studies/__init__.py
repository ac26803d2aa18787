"""The studies of the papers and our own, one file each."""
