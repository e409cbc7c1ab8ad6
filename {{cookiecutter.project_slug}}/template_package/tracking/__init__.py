"""Trackers: each file here has a class Tracker. The key `logging.tracker` names them."""
