"""Parts of deepspeed.py: the settings that DeepSpeed gets, and its state in checkpoints."""
