"""Weight pages and KV blocks in one arena: slots, page table, host store, mover."""
