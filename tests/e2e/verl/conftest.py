"""Collection of the end-to-end tests of verl's FSDP engines, trainers and batches."""

collect_ignore = ["pieces"]  # run by test_pieces.py, once for each tree
