"""The paged, prefix-cached store of K/V: token ids, hashes, blocks and bytes. It never sees a request or a network."""
