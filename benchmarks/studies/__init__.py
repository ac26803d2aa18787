"""The studies: those of the papers and those of optsched, one file each."""
