// Executor for one threadgroup: its threads are fibers of one OS thread, in lockstep (default), or
// OS threads (-DSMEMU_THREADS, for sanitizers; SMEMU_TSAN where that is ThreadSanitizer).
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include <atomic>
#include <memory>
#include <thread>
#if !(defined(__x86_64__) && defined(__ELF__)) || defined(SMEMU_UCONTEXT)
#include <ucontext.h>  // on macOS: needs -D_XOPEN_SOURCE
#endif
#ifdef SMEMU_THREADS
#include <barrier>
#include <mutex>
#endif

namespace smemu {

struct U3 { uint32_t x, y, z; };
struct SimdBuf { unsigned char v[32][16]; bool present[32]; };
enum State { READY, AT_SIMD, AT_TG, DONE };

struct Group;
struct Thread {
  Group* g; U3 pos; uint32_t index, lane, simd; State st; int site; unsigned parity; void* sp; char* stack;
};
struct Options {
  uint32_t seed;        // 0 = in order; else each round's order is shuffled
  uint32_t tg_limit;    // bytes of threadgroup memory allowed
  uint32_t workers;
  uint32_t cuda_grid;   // 1: blocks are always whole (CUDA); 0: edge groups shrink (Metal)
};
struct Group {
  U3 gpos, gdim, tgdim, grid, ngroups;   // gdim: this group's own size
  std::vector<Thread> th;
  std::vector<SimdBuf> buf;              // [simd][2]
  std::vector<std::pair<int, void*>> vars;   // threadgroup memory: each a heap block of exact size
  const Options* o; uint64_t rng; void* main_sp;
  uint64_t n_simd, n_bar; size_t tg_bytes;
#ifdef SMEMU_THREADS
  std::mutex allocating;
  std::vector<std::unique_ptr<std::barrier<>>> simds; std::unique_ptr<std::barrier<>> all;
  std::vector<std::thread> pool; std::unique_ptr<std::barrier<>> turn; bool over;
#endif
};

inline std::atomic<bool>& failed() { static std::atomic<bool> f{false}; return f; }
inline std::string& message() { static std::string s; return s; }
inline Thread*& cur_ref() { static thread_local Thread* t = nullptr; return t; }
inline Thread* cur() { return cur_ref(); }
struct Abort {};
[[noreturn]] inline void fault(const char* what, int site) {
  Thread* t = cur();
  char b[512];
  std::snprintf(b, sizeof b, "%s (line %d, threadgroup %u,%u,%u thread %u lane %u)", what, site,
                t ? t->g->gpos.x : 0, t ? t->g->gpos.y : 0, t ? t->g->gpos.z : 0, t ? t->index : 0, t ? t->lane : 0);
#ifdef SMEMU_THREADS
  std::fprintf(stderr, "fault: %s\n", b); std::_Exit(3);
#else
  if (!failed().exchange(true)) message() = b;
  throw Abort{};
#endif
}

#ifndef SMEMU_THREADS
#if defined(__x86_64__) && defined(__ELF__) && !defined(SMEMU_UCONTEXT)
extern "C" void smemu_switch(void** save, void* to);
asm(R"(
.text
.globl smemu_switch
.type smemu_switch,@function
smemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size smemu_switch,.-smemu_switch
)");
#else
// Anywhere else: `to` is a ucontext_t, and the place to save into already points to one.
inline void smemu_switch(void** save, void* to) { swapcontext((ucontext_t*)*save, (ucontext_t*)to); }
#define SMEMU_UCONTEXT 1
#endif
inline void yield_to_main() { Thread* t = cur(); smemu_switch(&t->sp, t->g->main_sp); if (failed()) throw Abort{}; }
#endif

// ---- called by the kernel
inline void* tg_alloc(int id, size_t bytes) {
  Group* g = cur()->g;
#ifdef SMEMU_THREADS
  std::lock_guard<std::mutex> l(g->allocating);   // (held before the kernel touches the memory)
#endif
  for (auto& v : g->vars) if (v.first == id) return v.second;
  g->tg_bytes += bytes;
  if (g->tg_bytes > g->o->tg_limit) fault("threadgroup memory over the limit", id);
  g->vars.push_back({id, std::memset(std::malloc(bytes), 0xFF, bytes)});   // poison: NaN
  return g->vars.back().second;
}

#ifndef SMEMU_THREADS
inline void simd_sync(int site, bool = false) { Thread* t = cur(); t->site = site; t->st = AT_SIMD; yield_to_main(); }
inline void tg_barrier(int site, bool) { Thread* t = cur(); t->site = site; t->st = AT_TG; yield_to_main(); }
struct Unseen {};
#else
// What is done while there is one is no synchronisation, and no write, to ThreadSanitizer.
#ifdef SMEMU_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char*, int); void AnnotateIgnoreSyncEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int); void AnnotateIgnoreWritesEnd(const char*, int);
}
struct Unseen {
  Unseen() { AnnotateIgnoreSyncBegin("", 0); AnnotateIgnoreWritesBegin("", 0); }
  ~Unseen() { AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreSyncEnd("", 0); }
};
#else
struct Unseen { ~Unseen() {} };
#endif
// A simdgroup's operations exchange values and wait for each other, but order no memory, unless it is
// a barrier that says so. (Divergence hangs here, or passes: it is for lockstep to report.)
inline void simd_sync(int, bool orders_memory = false) {
  Thread* t = cur(); std::barrier<>& b = *t->g->simds[t->simd];
  if (orders_memory) b.arrive_and_wait();
  else { Unseen unseen; b.arrive_and_wait(); }
}
inline void tg_barrier(int, bool) { cur()->g->all->arrive_and_wait(); }
#endif
inline SimdBuf* simd_put(const void* v, size_t n, int site) {
  Thread* t = cur();
  SimdBuf* b = &t->g->buf[t->simd * 2 + (t->parity & 1)];
  t->parity++;
  {
    Unseen unseen;
    std::memcpy(b->v[t->lane], v, n);
    b->present[t->lane] = true;
  }
  simd_sync(site);
  return b;
}

typedef void (*Entry)(Thread*, void**);

#ifndef SMEMU_THREADS
struct Launch { Entry e; void** bufs; };
inline Launch*& launch_ref() { static thread_local Launch* l = nullptr; return l; }
inline void fiber_main() {
  Thread* t = cur();
  try { launch_ref()->e(t, launch_ref()->bufs); } catch (Abort&) {}
  t->st = DONE;
  smemu_switch(&t->sp, t->g->main_sp);
  __builtin_trap();
}
#endif

constexpr size_t kStack = 256 * 1024;

inline void run_group(Group& g, Entry e, void** bufs) {
  const uint32_t n = g.gdim.x * g.gdim.y * g.gdim.z, ns = (n + 31) / 32;
  if (g.th.size() < n) g.th.resize(n);
  if (g.buf.size() < ns * 2) g.buf.resize(ns * 2);
  g.tg_bytes = 0;
  for (auto& b : g.buf) std::memset(b.present, 0, sizeof b.present);
  for (uint32_t i = 0; i < n; i++) {
    Thread& t = g.th[i];
    t.g = &g; t.index = i; t.lane = i % 32; t.simd = i / 32; t.st = READY; t.parity = 0;
    t.pos = {i % g.gdim.x, (i / g.gdim.x) % g.gdim.y, i / (g.gdim.x * g.gdim.y)};
  }
#ifdef SMEMU_THREADS
  g.all = std::make_unique<std::barrier<>>(n);
  g.simds.clear();
  for (uint32_t i = 0; i < n; i += 32) g.simds.push_back(std::make_unique<std::barrier<>>(n - i < 32 ? n - i : 32));
  if (g.pool.empty()) {
    g.turn = std::make_unique<std::barrier<>>(n + 1);
    for (uint32_t i = 0; i < n; i++)
      g.pool.emplace_back([&g, e, bufs, i] {
        for (g.turn->arrive_and_wait(); !g.over; g.turn->arrive_and_wait()) {
          Thread* t = cur_ref() = &g.th[i];
          e(t, bufs);
          g.simds[t->simd]->arrive_and_drop(); g.all->arrive_and_drop();
          g.turn->arrive_and_wait();
        }
      });
  }
  if (g.pool.size() != n) fault("threadgroups of different sizes", 0);
  g.turn->arrive_and_wait(); g.turn->arrive_and_wait();   // they begin, they are done
#else
  for (uint32_t i = 0; i < n; i++) {
    Thread& t = g.th[i];
    if (!t.stack) t.stack = (char*)std::malloc(kStack);
#ifdef SMEMU_UCONTEXT
    if (!t.sp) t.sp = new ucontext_t;
    ucontext_t* u = (ucontext_t*)t.sp;
    getcontext(u);
    u->uc_stack.ss_sp = t.stack; u->uc_stack.ss_size = kStack; u->uc_link = nullptr;
    makecontext(u, fiber_main, 0);
#else
    void** sp = (void**)(t.stack + kStack - 16);   // 16-aligned; the entry sees rsp % 16 == 8
    *--sp = nullptr;
    *--sp = (void*)&fiber_main;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    t.sp = sp;
#endif
  }
#ifdef SMEMU_UCONTEXT
  ucontext_t main_context; g.main_sp = &main_context;
#endif
  Launch l{e, bufs}; launch_ref() = &l;
  // seed 0: in order; 1: reversed; else shuffled. Depth first: a simdgroup runs
  // until its lanes stand at a threadgroup_barrier, so that simd-wide sync cannot
  // pass for threadgroup-wide sync.
  std::vector<uint32_t> so(ns), lo(32);
  auto shuffle = [&](std::vector<uint32_t>& v) {
    for (uint32_t i = 0; i < v.size(); i++) v[i] = g.o->seed == 1 ? uint32_t(v.size()) - 1 - i : i;
    if (g.o->seed > 1) for (uint32_t i = uint32_t(v.size()) - 1; i > 0; i--) {
      g.rng = g.rng * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(v[i], v[(g.rng >> 33) % (i + 1)]);
    }
  };
  auto resume = [&](Thread& t) { cur_ref() = &t; t.st = READY; smemu_switch(&g.main_sp, t.sp); };
  for (bool over = false; !over && !failed();) {
    shuffle(so);
    for (uint32_t s : so) {
      const uint32_t a = s * 32, z = a + 32 < n ? a + 32 : n;
      for (;;) {
        shuffle(lo);
        for (uint32_t l : lo) if (a + l < z && g.th[a + l].st == READY) { resume(g.th[a + l]); if (failed()) goto out; }
        uint32_t live = 0, at = 0; int site = -1; bool same = true;
        for (uint32_t i = a; i < z; i++) {
          Thread& t = g.th[i];
          if (t.st == DONE) continue;
          live++;
          if (t.st == AT_SIMD) { at++; if (site < 0) site = t.site; else if (site != t.site) same = false; }
        }
        if (!at) break;
        cur_ref() = &g.th[a];
        try {
          if (!same || at != live) fault("divergent simd operation: lanes of one simdgroup wait in different places", site);
          if (live != z - a) fault("simd operation with lanes that already returned (not portable to CUDA)", site);
        } catch (Abort&) { goto out; }
        g.n_simd++;
        for (uint32_t i = a; i < z; i++) g.th[i].st = READY;
      }
    }
    uint32_t at = 0; int site = -1; bool same = true;
    for (uint32_t i = 0; i < n; i++) {
      Thread& t = g.th[i];
      if (t.st != AT_TG) continue;
      at++; if (site < 0) site = t.site; else if (site != t.site) same = false;
    }
    if (!at) { over = true; break; }
    cur_ref() = &g.th[0];
    try {
      if (!same) fault("divergent threadgroup_barrier", site);
      if (at != n) fault("threadgroup_barrier not reached by threads that already returned", site);
    } catch (Abort&) { goto out; }
    g.n_bar++;
    for (uint32_t i = 0; i < n; i++) g.th[i].st = READY;
  }
out:
  if (failed()) for (uint32_t i = 0; i < n; i++) if (g.th[i].st != DONE) resume(g.th[i]);   // unwind the rest
#endif
  for (auto& v : g.vars) std::free(v.second);
  g.vars.clear();
}

inline int launch(Entry e, void** bufs, const uint32_t* grid, const uint32_t* tg, const Options* o, uint64_t* stats, char* err, int errn) {
  U3 G{grid[0], grid[1], grid[2]}, B{tg[0] < grid[0] ? tg[0] : grid[0], tg[1] < grid[1] ? tg[1] : grid[1], tg[2] < grid[2] ? tg[2] : grid[2]};
  U3 N{(G.x + B.x - 1) / B.x, (G.y + B.y - 1) / B.y, (G.z + B.z - 1) / B.z};
  failed() = false; message().clear();
  uint64_t total = (uint64_t)N.x * N.y * N.z;
  std::atomic<uint64_t> ns{0}, nb{0}; std::atomic<size_t> mem{0};
  const uint32_t W = o->workers ? o->workers : 1;
  auto work = [&](uint32_t w) {
    Group g{}; g.o = o; g.rng = o->seed * 2654435761u + w;
    for (uint64_t i = w; i < total && !failed(); i += W) {   // (a queue would order them for ThreadSanitizer)
      g.gpos = {(uint32_t)(i % N.x), (uint32_t)(i / N.x % N.y), (uint32_t)(i / N.x / N.y)};
      g.tgdim = B; g.grid = G; g.ngroups = N; g.gdim = B;
      if (!o->cuda_grid) {
        if ((g.gpos.x + 1) * B.x > G.x) g.gdim.x = G.x - g.gpos.x * B.x;
        if ((g.gpos.y + 1) * B.y > G.y) g.gdim.y = G.y - g.gpos.y * B.y;
        if ((g.gpos.z + 1) * B.z > G.z) g.gdim.z = G.z - g.gpos.z * B.z;
      }
      run_group(g, e, bufs);
      if (g.tg_bytes > mem) mem = g.tg_bytes;
    }
#ifdef SMEMU_THREADS
    if (g.turn) { g.over = true; g.turn->arrive_and_wait(); }
    for (auto& t : g.pool) t.join();
#endif
    ns += g.n_simd; nb += g.n_bar;
    for (auto& t : g.th) {
      std::free(t.stack);
#ifdef SMEMU_UCONTEXT
      delete (ucontext_t*)t.sp;
#endif
    }
  };
  std::vector<std::thread> ts;
  for (uint32_t w = 1; w < W; w++) ts.emplace_back(work, w);
  work(0);
  for (auto& t : ts) t.join();
  stats[0] = total; stats[1] = ns; stats[2] = nb; stats[3] = mem;
  if (failed()) { std::snprintf(err, errn, "%s", message().c_str()); return 1; }
  return 0;
}
}  // namespace smemu
