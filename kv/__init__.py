"""Where tokens live: the page pool, the page table, the cache arrays and the paged-attention seam."""
