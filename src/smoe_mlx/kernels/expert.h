  // out[pair, row] = sm_activation(up, gate) of rows of the expert in slot[pair], for one input row.
  // A slot that the bank does not have (say 0xffffffff: not in memory) gives 0 and reads nothing.
  //
  // inp   [tokens, K] if PER_TOKEN, else [pairs, K]; pair = token * top-k + place
  // slot  [tokens, top-k]
  // wu su bu cu, wg sg bg cg: codes [slots, N, K * BITS / 32], scales and offsets of groups
  //       [slots, N, K / GROUP], bias [slots, N]; the second set only if GATED, bias only if BIAS
  // grid: y = pair, x = block of rows; SIMDS simdgroups. LANES lanes share a row, each takes 16
  // bytes of it at a time, and ROWS such rows.
  constexpr int CODES = 128 / BITS;                                 // in a chunk of 16 bytes
  constexpr int WORD_QUADS = 8 / BITS;                              // a quad: four codes
  constexpr int QUADS = 4 * WORD_QUADS;                             // in a chunk
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int WORDS = GROUP * BITS < 128 ? GROUP * BITS / 32 : 4; // of one group in a chunk
  constexpr int PARTS = 4 / WORDS;                                  // groups in a chunk, at least 1
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int BESIDE = 32 / LANES;                                // rows side by side
  SM_SHARED(float4, xs, QUADS * CHUNKS); // transposed, so that neighbouring lanes read neighbours
  SM_SHARED(float, xsum, PARTS * CHUNKS);

  const uint32_t tokens_row = PER_TOKEN ? sm_pair / uint32_t(slot_shape[1]) : sm_pair;
  const uint32_t expert = uint32_t(slot[sm_pair]);
  const bool there = expert < uint32_t(wu_shape[0]);

  for (uint32_t start = 0u; start < uint32_t(K / 4); start += uint32_t(SIMDS * 32)) {
    const uint32_t i = start + sm_thread;
    float4 v = SM_FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < uint32_t(K / 4)) {
      const size_t at = size_t(tokens_row) * uint32_t(K) + 4u * i;
      v = SM_FLOAT4(float(inp[at]), float(inp[at + 1]), float(inp[at + 2]), float(inp[at + 3]));
    }
    const float sum = sm_lane_sum<WORDS * WORD_QUADS>((v.x + v.y) + (v.z + v.w));
    if (i < uint32_t(K / 4)) {
      const float f = sm_quad_scale<BITS>(i % uint32_t(WORD_QUADS));
      const float g = f * (1.0f / float(1u << BITS));
      const float h = g * (1.0f / float(1u << BITS));
      xs[(i % uint32_t(QUADS)) * uint32_t(CHUNKS) + i / uint32_t(QUADS)] =
          SM_FLOAT4(v.x * f, v.y * g, v.z * h, v.w * (h * (1.0f / float(1u << BITS))));
      if (i % uint32_t(WORDS * WORD_QUADS) == 0u) {
        xsum[i / uint32_t(WORDS * WORD_QUADS)] = sum;
      }
    }
  }
  SM_BARRIER();

  const uint32_t first = (sm_block * SIMDS + sm_simd) * uint32_t(BESIDE * ROWS) + sm_lane / LANES;
  const uint32_t lane = sm_lane % LANES;
  size_t line[ROWS];
  float up[ROWS];
  float gate[ROWS];
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    line[r] = size_t(there ? expert : 0u) * uint32_t(N) + (row < uint32_t(N) ? row : 0u);
    up[r] = 0.0f;
    gate[r] = 0.0f;
  }
  if (there) {
    const SM_DEVICE uint4* wu4 = (const SM_DEVICE uint4*)wu;
    const SM_DEVICE uint4* wg4 = (const SM_DEVICE uint4*)wg;
    for (uint32_t c = lane; c < uint32_t(CHUNKS); c += uint32_t(LANES)) {
      uint4 qu[ROWS];
      uint4 qg[ROWS];
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        qu[r] = SM_LOAD16(wu4, line[r] * uint32_t(CHUNKS) + c);
        if (GATED) {
          qg[r] = SM_LOAD16(wg4, line[r] * uint32_t(CHUNKS) + c);
        }
      }
      SM_UNROLL
      for (int p = 0; p < PARTS; p++) {
        float du[ROWS];
        float dg[ROWS];
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          du[r] = 0.0f;
          dg[r] = 0.0f;
        }
        SM_UNROLL
        for (int w = p * WORDS; w < (p + 1) * WORDS; w++) {
          SM_UNROLL
          for (int j = 0; j < WORD_QUADS; j++) {
            const float4 x = xs[uint32_t((w * WORD_QUADS + j) * CHUNKS) + c];
            SM_UNROLL
            for (int r = 0; r < ROWS; r++) {
              du[r] += sm_dot4<BITS>(sm_word(qu[r], w), j, x);
              if (GATED) {
                dg[r] += sm_dot4<BITS>(sm_word(qg[r], w), j, x);
              }
            }
          }
        }
        const float sum = xsum[c * uint32_t(PARTS) + uint32_t(p)];
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const size_t g = line[r] * uint32_t(K / GROUP) +
              (PARTS > 1 ? c * uint32_t(PARTS) + uint32_t(p) : c / uint32_t(SPAN));
          up[r] += float(su[g]) * du[r] + float(bu[g]) * sum;
          if (GATED) {
            gate[r] += float(sg[g]) * dg[r] + float(bg[g]) * sum;
          }
        }
      }
    }
  }
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = first + uint32_t(r * BESIDE);
    float u = sm_lane_sum<LANES>(up[r]);
    float g = GATED ? sm_lane_sum<LANES>(gate[r]) : 0.0f;
    if (lane == 0u && row < uint32_t(N)) {
      if (BIAS && there) {
        u += float(cu[line[r]]);
        if (GATED) {
          g += float(cg[line[r]]);
        }
      }
      out[size_t(sm_pair) * uint32_t(N) + row] =
          static_cast<T>(there ? sm_activation(u, g) : 0.0f);
    }
  }
