"""Recipes and configs of published checkpoints, as files; installed as `dflash_trt.build_recipes`."""
