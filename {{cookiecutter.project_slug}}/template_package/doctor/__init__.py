"""What `python run.py doctor` looks at: one file for each kind of check, the list of them in checks.py."""
