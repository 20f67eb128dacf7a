"""The iterator of the training loop, and the background threads that make its batches ahead."""
