"""Arrays that live on disk: stores of rows, ours and the rivals', at the works of a shelf."""
