"""The commands of the command line, one module for each family. Loading them loads no torch."""
