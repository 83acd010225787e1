"""Rows and their columns: records, batches, ragged columns, identities, the wire format."""
