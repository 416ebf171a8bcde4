// Twin of a part of flashdraft/kernels/cuda/hopper_linear.cuh for the CPU: the threads of a whole cluster are fibers.
//
// What may come late does: wgmma reads its matrices and adds to its sums when the program waits for it, the copy engine (TMA)
// brings its boxes at random times and in any order. Warps take turns in a random order, and now and then one starves. Shared
// memory starts as NaN; what copies and fresh loads read is checked as in emulation.h, and all of them are for what earlier
// kernels write, so they must come behind the wait for those.
#pragma once

#include <map>
#include <random>

#define FLASHDRAFT_KERNEL
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};

// What the driver makes a tensor map of, innermost first; strides in bytes, the first is not used. Mirrored by
// hopper_emulation.py.
struct TensorMap {
  const char* base;
  int64_t rank, sizes[3], strides[3], box[3];
};

namespace emulation::cluster {

// An address in shared memory is the block's rank times WINDOW and a place in it: in as many bits as wgmma has for one.
constexpr u32 WINDOW = 1 << 18, START = 1024;
constexpr u32 NAN_BITS = 0x7fff7fffu;  // as float32, bf16 and fp16
constexpr int GUARD = 16;              // such words behind the shared memory
// Rounds in which no thread got on and no load was under way; a thread that could go on has long had its turn then.
constexpr int TOO_MANY_IDLE_ROUNDS = 100;

struct Product {
  float* sums;
  int count;
  u64 a, b;
  bool add;
};
struct Load {
  TensorMap map;
  int64_t at[3];
  u32 place, barrier;
};
struct TransferBarrier {
  int arrivals, pending;
  int64_t bytes;
  u32 parity;
};
struct Thread : emulation::Thread {
  std::deque<std::vector<Product>> products;  // committed; the last one is open
  int generation;                             // of the cluster's barrier, when this thread came to it
};
struct Block {
  std::vector<u32> memory;
  Barrier all, consumers;
  int running;  // threads
};

inline std::vector<Thread> threads;
inline std::vector<Block> blocks;
inline std::vector<Warp> warps;
inline Barrier everyone;
inline std::map<u32, TransferBarrier> barriers;
inline std::vector<Load> loads;
inline std::mt19937 chance;
inline int percent_late;     // of the loads under way, after each round
inline const char* product;  // the name of the kernel's wgmma
inline int index;            // of the thread whose turn it is
inline bool moved;           // whether a thread got on or a load arrived in this round

inline Thread& self() { return threads[index]; }
inline int rank() { return index / (int)(threads.size() / blocks.size()); }
inline Block& block() { return blocks[rank()]; }
inline Warp& warp() { return warps[index / LANES]; }
inline char* own_memory() { return reinterpret_cast<char*>(block().memory.data()); }

inline void yield() { swapcontext(&self().context, &scheduler); }

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
  moved = true;
}

// The generation that ends when all have come.
inline int come_to(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return generation;
}
inline void wait_at(const Barrier& barrier, int generation) {
  wait_until([&] { return barrier.generation != generation; });
}
inline void meet_at(Barrier& barrier) { wait_at(barrier, come_to(barrier)); }

// Up to 16 bytes of a block that still runs.
inline char* at(u32 address, u32 bytes = 16) {
  static char nowhere[16];
  const u32 of_block = address / WINDOW, place = address % WINDOW;
  if (of_block >= blocks.size() || place < START || place + bytes > START + 4 * (blocks[of_block].memory.size() - GUARD)) {
    fail("an address outside of the shared memory");
    return nowhere;
  }
  if (blocks[of_block].running == 0) fail("the shared memory of a block that has ended");
  return reinterpret_cast<char*>(blocks[of_block].memory.data()) + place - START;
}

// Of 16-byte pieces and what is in them, within 1,024 bytes.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

inline TransferBarrier& barrier_at(u32 address) {
  if (!barriers.count(address)) fail("a barrier that is not there");
  return barriers[address];
}
inline void count(u32 address, int arrivals, int64_t bytes) {
  TransferBarrier& barrier = barrier_at(address);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) fail("more arrivals at a barrier than it is for");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.arrivals;
    barrier.parity ^= 1;
  }
}

inline void perform(const Load& load) {
  const TensorMap& map = load.map;
  u32 place = load.place;
  if (place % 1024) fail("a box that does not start where the swizzle does");
  for (int64_t z = load.at[2]; z < load.at[2] + map.box[2]; ++z)
    for (int64_t y = load.at[1]; y < load.at[1] + map.box[1]; ++y)
      for (int64_t x = load.at[0]; x < load.at[0] + map.box[0]; x += 8, place += 16) {
        char* to = at(swizzled(place));
        if (x < map.sizes[0] && y < map.sizes[1] && z < map.sizes[2]) {
          const char* from = map.base + 2 * x + y * map.strides[1] + z * map.strides[2];
          check(from, 16);
          std::memcpy(to, from, 16);
        } else {
          std::memset(to, 0, 16);
        }
      }
  count(load.barrier, 0, (int64_t)load.place - place);
}

inline void check_waited() {
  if (!self().waited) fail("what earlier kernels write was read before the wait for them");
}

inline void ask(u32 place, const TensorMap& map, int64_t k, int64_t row, int rank, u32 barrier) {
  if (map.rank != rank) fail("a load of another rank than its tensor's");
  barrier_at(barrier);
  loads.push_back({map, {k, row, 0}, place, barrier});
}

// An element of a matrix that a descriptor tells of, by wgmma's rules for rows of 128 swizzled bytes.
inline float element(u64 matrix, int row, int k, float (*widen)(u32)) {
  const u32 start = (u32)(matrix & 0x3fff) << 4, eight_rows = (u32)(matrix >> 32 & 0x3fff) << 4;
  const u32 pair = start + row / 8 * eight_rows + row % 8 * 128 + 2 * k;
  const char* piece = at(rank() * WINDOW + swizzled(pair / 16 * 16));
  unsigned short bits;
  std::memcpy(&bits, piece + pair % 16, 2);
  return widen(bits);
}

// This thread's sums: of warp w, lane (g, t) = (lane / 4, lane % 4), rows 16 w + g and + 8, of each 8 columns 2 t and + 1.
inline void perform(const Product& p) {
  float (*widen)(u32) = std::strstr(product, ".bf16.bf16") ? Bf16::low : Fp16::low;
  const int thread = index % 128, first_row = thread / 32 * 16 + thread % 32 / 4, first_column = 2 * (thread % 4);
  if (p.a >> 62 != 1 || p.b >> 62 != 1) fail("a matrix that is not swizzled as TMA does");
  float a[2][16];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 16; ++k) a[half][k] = element(p.a, first_row + 8 * half, k, widen);
  for (int i = 0; i < p.count; ++i) {
    float sum = p.add ? p.sums[i] : 0.f;
    const int column = i / 4 * 8 + first_column + i % 2;
    for (int k = 0; k < 16; ++k) sum += a[i / 2 % 2][k] * element(p.b, column, k, widen);
    p.sums[i] = sum;
  }
}

inline void entry() {
  (*program)();
  if (self().products.size() > 1 || !self().products.back().empty()) fail("a product that nobody waited for");
  self().done = moved = true;
  --block().running;
  yield();
}

inline void begin(int block_count, int block_threads, int shared_bytes) {
  const size_t count = block_count * block_threads;
  threads.resize(count);  // their stacks stay
  blocks.assign(block_count, {});
  for (Block& b : blocks) {
    b.memory.assign(shared_bytes / 4 + GUARD, NAN_BITS);
    b.all = {block_threads, 0, 0};
    b.running = block_threads;
  }
  warps.assign(count / LANES, {});
  for (Warp& w : warps) w.barrier = {LANES, 0, 0};
  everyone = {(int)count, 0, 0};
  barriers.clear();
  loads.clear();
  for (Thread& thread : threads) {
    if (!thread.stack) thread.stack.reset(new char[STACK]);
    thread.done = thread.waited = false;
    thread.products.assign(1, {});
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
}

// A turn for most warps; then some loads arrive.
inline void play_round(int first_block) {
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), chance);
  for (int warp : order) {
    if (chance() % 3 == 0) continue;
    for (index = warp * LANES; index < (warp + 1) * LANES; ++index) {
      if (self().done) continue;
      current = index % (int)(threads.size() / blocks.size());
      blockIdx = {(unsigned)(first_block + rank()), 0};
      swapcontext(&scheduler, &self().context);
    }
  }
  while (!loads.empty() && (int)(chance() % 100) >= percent_late) {
    std::swap(loads[chance() % loads.size()], loads.back());
    perform(loads.back());
    loads.pop_back();
    moved = true;
  }
}

// Runs a cluster to its end, or to the first fault.
inline void run(const std::function<void()>& body, int first_block, int block_count, int block_threads, int shared_bytes) {
  program = &body;
  begin(block_count, block_threads, shared_bytes);
  const auto runs = [](const Block& b) { return b.running > 0; };
  for (int idle = 0; !fault && std::any_of(blocks.begin(), blocks.end(), runs);) {
    moved = false;
    play_round(first_block);
    idle = moved || !loads.empty() ? 0 : idle + 1;
    if (idle == TOO_MANY_IDLE_ROUNDS) fail("threads wait for each other for ever");
  }
  if (!fault && !loads.empty()) fail("loads under way at the end");
  for (const Block& b : blocks)
    if (std::any_of(b.memory.end() - GUARD, b.memory.end(), [](u32 word) { return word != NAN_BITS; }))
      fail("a write past the shared memory");
}

// Of a block or a warp in a cluster, what emulation.h has for the threads of a single block.

inline void meet_block() { meet_at(block().all); }
inline void meet_warp() { meet_at(warp().barrier); }
inline u32 shuffle_xor(u32, u32 value, int offset) {
  Warp& w = warp();
  const int lane = index % LANES;
  w.values[lane][0] = value;
  meet_at(w.barrier);
  value = w.values[lane ^ offset][0];
  meet_at(w.barrier);
  return value;
}
inline unsigned short load(const unsigned short* global) {
  check(global, 2);
  check_waited();
  return *global;
}
inline void wait_for_earlier_kernels() { self().waited = true; }

}  // namespace emulation::cluster

#define __syncthreads emulation::cluster::meet_block
#define __syncwarp emulation::cluster::meet_warp
#define __shfl_xor_sync emulation::cluster::shuffle_xor
#define load_fresh emulation::cluster::load
#define wait_for_earlier_kernels emulation::cluster::wait_for_earlier_kernels

inline void __trap() { emulation::fail("a trap"); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }

#define SHARED_MEMORY(name) char* const name = emulation::cluster::own_memory()
inline u32 shared_address(const void* shared) {
  using namespace emulation::cluster;
  return rank() * WINDOW + START + (u32)(static_cast<const char*>(shared) - own_memory());
}

inline void init_barrier(u32 barrier, int arrivals) {
  emulation::cluster::at(barrier, 8);
  emulation::cluster::barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void show_barriers() {}
inline void expect_bytes(u32 barrier, u32 bytes) { emulation::cluster::count(barrier, 1, bytes); }
inline void arrive(u32 barrier) { emulation::cluster::count(barrier, 1, 0); }
inline void wait_for(u32 barrier, u32 parity) {
  const auto& found = emulation::cluster::barrier_at(barrier);
  emulation::cluster::wait_until([&] { return found.parity != parity; });
}

inline u32 cluster_rank() { return emulation::cluster::rank(); }
inline u32 address_in(u32 rank, u32 shared) {
  return rank * emulation::cluster::WINDOW + shared % emulation::cluster::WINDOW;
}
inline float4 load_from_cluster(u32 there) {
  if (there % 16) emulation::fail("an unaligned load");
  float4 v;
  std::memcpy(&v, emulation::cluster::at(there), 16);
  return v;
}
template <bool WRITTEN>
void arrive_at_cluster() {
  using namespace emulation::cluster;
  self().generation = come_to(everyone);
}
inline void wait_for_whole_cluster() {
  using namespace emulation::cluster;
  wait_at(everyone, self().generation);
}
template <int COUNT>
void meet_consumers() {
  auto& barrier = emulation::cluster::block().consumers;
  barrier.size = COUNT;
  emulation::cluster::meet_at(barrier);
}

inline void load_weights(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  emulation::cluster::ask(shared, map, k, row, 3, barrier);
}
inline void load_rows(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  emulation::cluster::check_waited();
  emulation::cluster::ask(shared, map, k, row, 2, barrier);
}
inline void fetch_map(const TensorMap&) {}

template <int COUNT>
void multiply_matrices(float (&d)[COUNT], u64 a, u64 b, int add) {
  using namespace emulation::cluster;
  if (std::atoi(product + 4) != 2 * COUNT) emulation::fail("a wgmma with another number of sums");  // m64n...
  self().products.back().push_back({d, COUNT, a, b, add != 0});
}
inline void begin_products() {}
inline void commit_products() { emulation::cluster::self().products.emplace_back(); }
template <int PENDING>
void wait_for_products() {
  auto& groups = emulation::cluster::self().products;
  for (; groups.size() > PENDING + 1; groups.pop_front())
    for (const auto& product : groups.front()) emulation::cluster::perform(product);
}
template <int COUNT>
void hold(float (&)[COUNT]) {}

template <int COUNT>
void take_registers() {}
template <int COUNT>
void give_registers() {}
