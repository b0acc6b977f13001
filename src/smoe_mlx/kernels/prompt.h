  // out[i, n] = sm_activation(up, gate) of rows n of the expert in slot[i], for inp[row[i]].
  // Rows i are in the order of their slots. A tile is up to ROWS of them, all of one slot. One that
  // the bank does not have gives 0 and reads nothing.
  //
  // inp     [.., K], slot [rows], row [rows]: which of inp; tile [tiles + 1]: where tiles begin, then
  //         the number of rows
  // wu su bu au, wg sg bg ag: as in expert.h
  // out     [rows, N]
  // grid: y = tile, x = block of columns. Each of SIMDS simdgroups computes all rows of the tile in
  // COLUMNS columns (GATED: half of them of gate), STEP numbers of K at a time, which lie in
  // threadgroup memory meanwhile, weights as T.
  constexpr int LOADS = 32 % BITS == 0 ? 1 : BITS;                  // of 16 bytes, in a chunk
  constexpr int CODES = 128 * LOADS / BITS;                         // in a chunk
  constexpr int CHUNKS = K / CODES;                                 // in a row
  constexpr int PARTS = CODES > GROUP ? CODES / GROUP : 1;          // groups in a chunk
  constexpr int SPAN = GROUP > CODES ? GROUP / CODES : 1;           // chunks in a group
  constexpr int THREADS = 32 * SIMDS;
  constexpr int WIDE = SIMDS * COLUMNS;                             // rows of weights in a block
  constexpr int LINE = STEP + 8;                                    // so that lanes meet other banks
  constexpr int EIGHTS = STEP / 8;                                  // 16 bytes of x, in a step
  constexpr int BESIDE = STEP / CODES;                              // chunks in a step
  constexpr int STEPS = (K + STEP - 1) / STEP;
  constexpr int XS = (ROWS * EIGHTS + THREADS - 1) / THREADS;       // loads of x for a thread
  constexpr int WS = (WIDE * BESIDE + THREADS - 1) / THREADS;       // chunks for a thread
  constexpr int DOWN = ROWS / 16;                                   // 16 x 8 sums, one below another
  constexpr int ACROSS = COLUMNS / 8;                               // and side by side
  constexpr int SIDES = GATED ? 2 : 1;
  constexpr int OURS = COLUMNS / SIDES;                             // columns of out, of a simdgroup
  SM_SHARED(uint4, xs, ROWS * LINE / 8);
  SM_SHARED(uint4, ws, WIDE * LINE / 8);

  const uint32_t begin = uint32_t(tile[sm_y]);
  if (begin >= uint32_t(slot_shape[0])) {
    return;
  }
  const uint32_t count = uint32_t(tile[sm_y + 1u]) - begin;
  const uint32_t expert = uint32_t(slot[begin]);
  const bool there = expert < uint32_t(wu_shape[0]);

  const SM_DEVICE uint4* x8 = (const SM_DEVICE uint4*)inp;
  const SM_DEVICE uint4* wu4 = (const SM_DEVICE uint4*)wu;
  const SM_DEVICE uint4* wg4 = (const SM_DEVICE uint4*)wg;
  size_t from[XS];
  SM_UNROLL
  for (int j = 0; j < XS; j++) {
    const uint32_t i = uint32_t(j * THREADS) + sm_thread;
    const uint32_t r = i / uint32_t(EIGHTS);
    from[j] = size_t(row[begin + (r < count ? r : 0u)]) * uint32_t(K / 8) + i % uint32_t(EIGHTS);
  }
  sm_sums sums[DOWN][ACROSS];
  SM_UNROLL
  for (int m = 0; m < DOWN; m++) {
    SM_UNROLL
    for (int n = 0; n < ACROSS; n++) {
      sm_clear(sums[m][n]);
    }
  }

  // What comes next is on its way while this is computed.
  uint4 x[XS];
  sm_chunk<LOADS, PARTS> q[WS];
  SM_NO_UNROLL
  for (int step = 0; step <= STEPS; step++) {
    if (step > 0) {
      SM_BARRIER();
      SM_UNROLL
      for (int j = 0; j < XS; j++) {
        const uint32_t i = uint32_t(j * THREADS) + sm_thread;
        if (i < uint32_t(ROWS * EIGHTS)) {
          xs[i / uint32_t(EIGHTS) * uint32_t(LINE / 8) + i % uint32_t(EIGHTS)] = x[j];
        }
      }
      SM_UNROLL
      for (int j = 0; j < WS; j++) {
        const uint32_t i = uint32_t(j * THREADS) + sm_thread;
        if (i < uint32_t(WIDE * BESIDE)) {
          const uint32_t at =
              i / uint32_t(BESIDE) * uint32_t(LINE / 8) + i % uint32_t(BESIDE) * uint32_t(CODES / 8);
          SM_UNROLL
          for (int e = 0; e < CODES / 8; e++) {
            const float scale = q[j].scale[e * 8 * PARTS / CODES];
            const float offset = q[j].offset[e * 8 * PARTS / CODES];
            float v[8];
            SM_UNROLL
            for (int k = 0; k < 8; k++) {
              const int code = 8 * e + k;
              v[k] = sm_code<BITS, HOW>(q[j], code) * sm_place<BITS, HOW>(scale, uint32_t(code)) +
                  offset;
            }
            uint4 eight;
            eight.x = sm_pair<T>(v[0], v[1]);
            eight.y = sm_pair<T>(v[2], v[3]);
            eight.z = sm_pair<T>(v[4], v[5]);
            eight.w = sm_pair<T>(v[6], v[7]);
            ws[at + uint32_t(e)] = eight;
          }
        }
      }
      SM_BARRIER();
    }
    if (step < STEPS) {
      SM_UNROLL
      for (int j = 0; j < XS; j++) {
        const uint32_t i = uint32_t(j * THREADS) + sm_thread;
        const uint32_t eighth = uint32_t(step * EIGHTS) + i % uint32_t(EIGHTS);
        x[j].x = x[j].y = x[j].z = x[j].w = 0u;
        if (i / uint32_t(EIGHTS) < count && eighth < uint32_t(K / 8)) {
          x[j] = x8[from[j] + uint32_t(step * EIGHTS)];
        }
      }
      SM_UNROLL
      for (int j = 0; j < WS; j++) {
        const uint32_t i = uint32_t(j * THREADS) + sm_thread;
        const uint32_t w = i / uint32_t(BESIDE);
        const uint32_t c = uint32_t(step * BESIDE) + i % uint32_t(BESIDE);
        const bool gate = GATED && w % uint32_t(COLUMNS) >= uint32_t(OURS);
        const uint32_t column = (sm_block * uint32_t(SIMDS) + w / uint32_t(COLUMNS)) * uint32_t(OURS) +
            w % uint32_t(OURS);
        const size_t line = size_t(expert) * uint32_t(N) + column;
        SM_UNROLL
        for (int l = 0; l < 4 * LOADS; l++) {
          q[j].w[l] = 0u;
        }
        SM_UNROLL
        for (int p = 0; p < PARTS; p++) {
          q[j].scale[p] = q[j].offset[p] = 0.0f;
        }
        if (there && w < uint32_t(WIDE) && column < uint32_t(N) && c < uint32_t(CHUNKS)) {
          sm_fetch<HOW, (1 << (BITS - 1)), CHUNKS, SPAN>(
              q[j], gate ? wg4 : wu4, gate ? sg : su, gate ? bg : bu, line, c);
        }
      }
      SM_LOADED();
    }
    if (step > 0) {
      const SM_GROUP T* xt = (const SM_GROUP T*)xs;
      const SM_GROUP T* wt = (const SM_GROUP T*)ws + sm_simd * uint32_t(COLUMNS * LINE);
      SM_UNROLL
      for (int k = 0; k < STEP; k += 16) {
        sm_right<T> b[ACROSS];
        SM_UNROLL
        for (int n = 0; n < ACROSS; n++) {
          sm_load(b[n], wt + n * 8 * LINE + k, LINE, sm_lane);
        }
        sm_left<T> a[DOWN];
        SM_UNROLL
        for (int m = 0; m < DOWN; m++) {
          sm_load(a[m], xt + m * 16 * LINE + k, LINE, sm_lane);
        }
        SM_LOADED();
        SM_UNROLL
        for (int m = 0; m < DOWN; m++) {
          if (uint32_t(16 * m) < count) {
            SM_UNROLL
            for (int n = 0; n < ACROSS; n++) {
              sm_multiply(sums[m][n], a[m], b[n]);
            }
          }
        }
      }
    }
  }

  SM_UNROLL
  for (int m = 0; m < DOWN; m++) {
    SM_UNROLL
    for (int low = 0; low < 2; low++) {
      const uint32_t i = uint32_t(16 * m + 8 * low) + sm_fragment_row(sm_lane);
      SM_UNROLL
      for (int n = 0; n < ACROSS / SIDES; n++) {
        const uint32_t column = (sm_block * uint32_t(SIMDS) + sm_simd) * uint32_t(OURS) +
            uint32_t(8 * n) + sm_fragment_column(sm_lane);
        if (i < count && column < uint32_t(N)) {
          float y[2];
          SM_UNROLL
          for (int p = 0; p < 2; p++) {
            float u = sm_sum(sums[m][n], 2 * low + p);
            float g = GATED ? sm_sum(sums[m][n + ACROSS - ACROSS / SIDES], 2 * low + p) : 0.0f;
            if (BIAS && there) {
              const size_t line = size_t(expert) * uint32_t(N) + column + uint32_t(p);
              u += float(au[line]);
              if (GATED) {
                g += float(ag[line]);
              }
            }
            y[p] = there ? sm_activation(u, g) : 0.0f;
          }
          ((SM_DEVICE uint32_t*)out)[(size_t(begin + i) * uint32_t(N) + column) / 2] =
              sm_pair<T>(y[0], y[1]);
        }
      }
    }
  }
