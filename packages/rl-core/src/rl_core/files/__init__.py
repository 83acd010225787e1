"""Files: durable writes, checksums, zarr arrays, JSON from strangers."""
