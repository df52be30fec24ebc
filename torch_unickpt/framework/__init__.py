"""torch: tested versions, and the declarations of hooks."""
