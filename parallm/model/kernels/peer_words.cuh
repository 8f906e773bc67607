// A word of 16 bytes in the memory of any GPU of the host, written and read past all caches but that of its memory. A GPU
// writes and reads it at once, or at least each quarter of it.
void store_word(uint64_t address, const uint32_t (&quarters)[4]) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(quarters[0]), "r"(quarters[1]),
               "r"(quarters[2]), "r"(quarters[3])
               : "memory");
}
void load_word(uint64_t address, uint32_t (&quarters)[4]) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quarters[0]), "=r"(quarters[1]), "=r"(quarters[2]), "=r"(quarters[3])
               : "l"(address)
               : "memory");
}
