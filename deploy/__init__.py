"""Files that `dflash-trt deploy` copies, and units and containers to copy by hand."""
