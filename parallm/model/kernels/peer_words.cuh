// A word of 16 bytes in the memory of any GPU of the host: values and marks in turn. A GPU writes and reads it at once, or
// at least each half of it.
void store_word(uint64_t address, uint32_t low, uint32_t high, uint32_t mark) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(address), "r"(low), "r"(mark), "r"(high)
               : "memory");
}
void load_word(uint64_t address, uint32_t& low, uint32_t& high, uint32_t (&marks)[2]) {
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(low), "=r"(marks[0]), "=r"(high), "=r"(marks[1])
               : "l"(address)
               : "memory");
}
