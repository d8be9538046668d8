"""The paged KV cache as bookkeeping over integers: blocks, reference counts, hashes, block tables."""
