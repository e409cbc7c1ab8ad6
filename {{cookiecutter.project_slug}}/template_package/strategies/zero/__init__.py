"""Builds DeepSpeed's settings and its state for checkpoints; deepspeed.py uses both."""
