"""Joint codecs: indices and values in one code. One file each; importing this package registers them all."""
