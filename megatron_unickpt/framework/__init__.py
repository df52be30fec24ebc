"""What the adapter reads of Megatron itself: private attributes, versions, sources of functions."""
