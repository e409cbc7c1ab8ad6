"""Parts of fsdp.py: how a model is built whose weights do not fit on every rank; of deepspeed.py too: gradients.py."""
