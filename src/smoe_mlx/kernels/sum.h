  // out[token, row] = sum over the token's places of score * row of the place's expert, times its h.
  // A slot that the bank does not have adds nothing and reads nothing.
  //
  // inp     [pairs, K] float, each row in chunks, transposed: quad 0 of every chunk, quad 1, ...
  // slot    [tokens, TOP_K], lookup [E]: as in expert.h; score [tokens, TOP_K]
  // wu su bu au: as in expert.h
  // grid: y = token, x = block of rows; TOP_K simdgroups, one a place. LANES lanes share a row, each
  // takes a chunk of it at a time, and ROWS such rows.
  constexpr int LOADS = 32 % BITS == 0 ? 1 : BITS;                  // of 16 bytes, in a chunk
  constexpr int CODES = 128 * LOADS / BITS;                         // in a chunk
  constexpr int QUADS = CODES / 4;                                  // a quad: four codes
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int PARTS = CODES > GROUP ? CODES / GROUP : 1;          // groups in a chunk
  constexpr int PART = QUADS / PARTS;                               // quads of one group in a chunk
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int BESIDE = 32 / LANES;                                // rows side by side
  constexpr int BLOCK = BESIDE * ROWS;                              // rows of a threadgroup
  SM_SHARED(float, part, TOP_K * BLOCK);

  const uint32_t pair = sm_y * uint32_t(TOP_K) + sm_simd;
  const uint32_t number = uint32_t(slot[pair]);
  const uint32_t expert = LOOKUP ? uint32_t(lookup[number]) : number;
  const bool there = expert < uint32_t(wu_shape[0]);
  const uint32_t beside = sm_lane / LANES;
  const uint32_t lane = sm_lane % LANES;
  size_t line[ROWS];
  float down[ROWS];
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const uint32_t row = sm_block * uint32_t(BLOCK) + uint32_t(r * BESIDE) + beside;
    line[r] = size_t(there ? expert : 0u) * uint32_t(N) + (row < uint32_t(N) ? row : 0u);
    down[r] = 0.0f;
  }
  if (there) {
    const SM_DEVICE uint4* wu4 = (const SM_DEVICE uint4*)wu;
    const SM_DEVICE float4* h4 = (const SM_DEVICE float4*)inp + size_t(pair) * uint32_t(K / 4);
    SM_UNROLL_AHEAD
    for (uint32_t c = lane; c < uint32_t(CHUNKS); c += uint32_t(LANES)) {
      sm_words<4 * LOADS> q[ROWS];
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        SM_UNROLL
        for (int i = 0; i < LOADS; i++) {
          const uint4 u =
              SM_LOAD16(wu4, (line[r] * uint32_t(CHUNKS) + c) * uint32_t(LOADS) + uint32_t(i));
          q[r].w[4 * i] = u.x;
          q[r].w[4 * i + 1] = u.y;
          q[r].w[4 * i + 2] = u.z;
          q[r].w[4 * i + 3] = u.w;
        }
      }
      SM_UNROLL
      for (int p = 0; p < PARTS; p++) {
        float sum = 0.0f;
        float d[ROWS];
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          d[r] = 0.0f;
        }
        SM_UNROLL
        for (int j = p * PART; j < (p + 1) * PART; j++) {
          float4 v = h4[uint32_t(j * CHUNKS) + c];
          sum += (v.x + v.y) + (v.z + v.w);
          const uint32_t i = 4u * uint32_t(j);
          v = SM_FLOAT4(
              (sm_place<BITS, HOW>(v.x, i)), (sm_place<BITS, HOW>(v.y, i + 1u)),
              (sm_place<BITS, HOW>(v.z, i + 2u)), (sm_place<BITS, HOW>(v.w, i + 3u)));
          SM_UNROLL
          for (int r = 0; r < ROWS; r++) {
            d[r] += sm_dot4<BITS, HOW>(q[r], j, v);
          }
        }
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const size_t g = line[r] * uint32_t(K / GROUP) +
              (PARTS > 1 ? c * uint32_t(PARTS) + uint32_t(p) : c / uint32_t(SPAN));
          down[r] += sm_scale(su[g]) * d[r];
          if (HOW != SM_FP4) {
            down[r] += float(bu[g]) * sum;
          }
        }
      }
    }
  }
  SM_UNROLL
  for (int r = 0; r < ROWS; r++) {
    float v = sm_lane_sum<LANES>(down[r]);
    if (lane == 0u) {
      if (BIAS && there) {
        v += float(au[line[r]]);
      }
      part[sm_simd * uint32_t(BLOCK) + uint32_t(r * BESIDE) + beside] =
          there ? float(score[pair]) * v : 0.0f;
    }
  }
  SM_BARRIER();
  for (uint32_t i = sm_thread; i < uint32_t(BLOCK); i += uint32_t(TOP_K * 32)) {
    const uint32_t row = sm_block * uint32_t(BLOCK) + i;
    if (row < uint32_t(N)) {
      float v = 0.0f;
      for (uint32_t k = 0u; k < uint32_t(TOP_K); k++) {
        v += part[k * uint32_t(BLOCK) + i];
      }
      out[size_t(sm_y) * uint32_t(N) + row] = static_cast<T>(v);
    }
  }
