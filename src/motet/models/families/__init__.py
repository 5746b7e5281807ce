"""One file for each family: an HF encoder that takes packed rows. Parameters and their names stay HF's."""
