  // After expert.h: miss [tokens], in whose bits k are set where the bank lacks the slot of place k.
  if (sm_block == 0u && sm_thread == 0u && sm_y % uint32_t(slot_shape[1]) == 0u) {
    uint32_t bits = 0u;
    for (uint32_t k = 0u; k < uint32_t(slot_shape[1]); k++) {
      const uint32_t n = uint32_t(slot[sm_y + k]);
      const uint32_t e = LOOKUP ? uint32_t(lookup[n]) : n;
      bits |= e < uint32_t(wu_shape[0]) ? 0u : 1u << k;
    }
    miss[sm_y / uint32_t(slot_shape[1])] = bits;
  }
