"""Builds DeepSpeed's settings, and the states that checkpoints under DeepSpeed contain. deepspeed.py uses both."""
