"""One file a command; each holds a function of the file's name. See `dflash_trt.cli`."""
