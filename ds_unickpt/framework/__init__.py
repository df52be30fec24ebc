"""What the adapter reads of DeepSpeed itself: private attributes, versions, sources of functions."""
