"""What `run.py benchmark` is made of: which rows there are, how one is measured, and what is written about them."""
