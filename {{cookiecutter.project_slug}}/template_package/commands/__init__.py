"""The commands of run.py besides `train`, each in a module of this folder that may be deleted.

Those that work on ranks have functions check() and work(), which run.py calls on each rank; the others have main(line).
"""
