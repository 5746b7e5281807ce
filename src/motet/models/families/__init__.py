"""One small file a family: an HF encoder made to take packed rows. Parameters and their names stay HF's."""
