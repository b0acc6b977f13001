  // out[token, row] = sum over the token's places of score * row of the place's expert, times its h.
  // A slot that the bank does not have adds nothing and reads nothing.
  //
  // inp     [pairs, K] float, each row in chunks, transposed: quad 0 of every chunk, quad 1, ...
  // slot    [tokens, top-k], lookup [E]: as in expert.h; score [tokens, top-k]
  // addend  [tokens, N], factor [tokens]: with ADDED 1 addend is added too, with 2 factor times it
  // wu su bu au: as in expert.h
  // grid: y = token, x = block of rows; top-k simdgroups, one a place. LANES lanes share a row, each
  // takes a chunk of it at a time, and ROWS such rows (at most LANES), and reads AHEAD chunks ahead.
  constexpr int LOADS = 32 % BITS == 0 ? 1 : BITS;                  // of 16 bytes, in a chunk
  constexpr int CODES = 128 * LOADS / BITS;                         // in a chunk
  constexpr int QUADS = CODES / 4;                                  // a quad: four codes
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int PARTS = CODES > GROUP ? CODES / GROUP : 1;          // groups in a chunk
  constexpr int PART = QUADS / PARTS;                               // quads of one group in a chunk
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int BESIDE = 32 / LANES;                                // rows side by side
  constexpr int BLOCK = BESIDE * ROWS;                              // rows of a threadgroup
  SM_SHARED(float, part, MAX_TOP_K * BLOCK);

  const uint32_t top_k = uint32_t(slot_shape[1]);
  const uint32_t pair = sm_y * top_k + sm_simd;
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
    // A queue of chunks: the last AHEAD of them are still on their way.
    sm_chunk<LOADS, PARTS> q[AHEAD + 1][ROWS];
    SM_UNROLL
    for (int a = 0; a < AHEAD; a++) {
      const uint32_t c = uint32_t(a * LANES) + lane;
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        if (c < uint32_t(CHUNKS)) {
          sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(q[a][r], wu4, su, bu, line[r], c);
        }
      }
    }
    SM_NO_UNROLL
    for (uint32_t start = 0u; start < uint32_t(CHUNKS); start += uint32_t(LANES)) {
      const uint32_t next = start + uint32_t(AHEAD * LANES) + lane;
      SM_UNROLL
      for (int r = 0; r < ROWS; r++) {
        if (next < uint32_t(CHUNKS)) {
          sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(q[AHEAD][r], wu4, su, bu, line[r], next);
        }
      }
      SM_LOADED();
      const uint32_t c = start + lane;
      if (c < uint32_t(CHUNKS)) {
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
              d[r] += sm_dot4<BITS, HOW>(q[0][r], j, v);
            }
          }
          SM_UNROLL
          for (int r = 0; r < ROWS; r++) {
            down[r] += q[0][r].scale[p] * d[r] + q[0][r].offset[p] * sum;
          }
        }
      }
      SM_UNROLL
      for (int a = 0; a < AHEAD; a++) {
        SM_UNROLL
        for (int r = 0; r < ROWS; r++) {
          q[a][r] = q[a + 1][r];
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
  const uint32_t row = sm_block * uint32_t(BLOCK) + sm_thread;
  if (sm_thread < uint32_t(BLOCK) && row < uint32_t(N)) {
    float v = 0.0f;
    for (uint32_t k = 0u; k < top_k; k++) {
      v += part[k * uint32_t(BLOCK) + sm_thread];
    }
    if (ADDED > 0) {
      const float more = float(addend[size_t(sm_y) * uint32_t(N) + row]);
      v += ADDED > 1 ? float(factor[sm_y]) * more : more;
    }
    out[size_t(sm_y) * uint32_t(N) + row] = static_cast<T>(v);
  }
