// Twin of a part of flashdraft/kernels/cuda/hopper.cuh for the CPU: the threads of a whole cluster are fibers.
//
// What may come late does: wgmma reads its matrices and adds to its sums when the program waits for it, the copy engine (TMA)
// brings its boxes at random times and in any order. Warps take turns in a random order, and now and then one starves. Shared
// memory starts as NaN; what copies and fresh loads read is checked as in emulation.h, and all of them are for what earlier
// kernels write, so they must come behind the wait for those.
#pragma once

#include <array>
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
  int64_t rank, sizes[4], strides[4], box[4];
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
  const u32* registers;  // of this thread, where a is not in shared memory, and what they held
  u32 held[4];
  std::array<std::array<float, 16>, 2> rows;  // of a, of this thread's sums
  bool transposed;                            // b has a row for each of the 16 inputs
};
// A box for the copy engine, or 16 bytes for another block.
struct Load {
  TensorMap map;
  int64_t at[4];
  u32 place, barrier;
  bool sent;
  float4 value;
};
struct TransferBarrier {
  int arrivals, pending;
  int64_t bytes;
  u32 parity;
};
struct Thread : emulation::Thread {
  std::deque<std::vector<Product>> products;  // committed; the last one is open
  int generation;                             // of the cluster's barrier, when this thread came to it
  const void* awaited;                        // what it waits for
  bool (*may_go_on)(const void*);             // null: for nothing
};
struct Block {
  std::vector<u32> memory;
  Barrier all, consumers, groups[2];
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

// The scheduler asks for the condition itself: a switch to a thread that still waits costs a hundred times as much.
template <typename Condition>
void wait_until(Condition condition) {
  self().awaited = &condition;
  self().may_go_on = [](const void* awaited) { return (*static_cast<const Condition*>(awaited))(); };
  while (!condition()) yield();
  self().may_go_on = nullptr;
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
  if (load.sent) {
    std::memcpy(at(place), &load.value, 16);
    return count(load.barrier, 0, -16);
  }
  if (place % 1024) fail("a box that does not start where the swizzle does");
  const int64_t w = load.at[3];  // boxes have one of the last dimension
  for (int64_t z = load.at[2]; z < load.at[2] + map.box[2]; ++z)
    for (int64_t y = load.at[1]; y < load.at[1] + map.box[1]; ++y)
      for (int64_t x = load.at[0]; x < load.at[0] + map.box[0]; x += 8, place += 16) {
        char* to = at(swizzled(place));
        if (x < map.sizes[0] && y < map.sizes[1] && z < map.sizes[2] && w < map.sizes[3]) {
          const char* from = map.base + 2 * x + y * map.strides[1] + z * map.strides[2] + w * map.strides[3];
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

// What a kernel before writes, element by element.
template <typename T>
struct Earlier {
  const T* at;
  T operator[](int64_t i) const {
    check_waited();
    return at[i];
  }
  T operator*() const { return (*this)[0]; }
  Earlier operator+(int64_t n) const { return {at + n}; }
};

inline void ask(u32 place, const TensorMap& map, const int64_t (&at)[4], int rank, u32 barrier) {
  if (map.rank != rank) fail("a load of another rank than its tensor's");
  barrier_at(barrier);
  loads.push_back({map, {at[0], at[1], at[2], at[3]}, place, barrier});
}

// A matrix [rows, 16] that a descriptor tells of, by wgmma's rules for rows of 128 swizzled bytes. Transposed: 64 of its rows lie
// beside each other for each of the 16 inputs, eight of which lie below each other.
struct Matrix {
  const char* memory;  // of the block, at address 0
  u32 start, eight, columns;
  bool transposed;
  float (*widen)(u32);

  Matrix(u64 matrix, int rows, bool transposed, float (*widen)(u32))
      : start((u32)(matrix & 0x3fff) << 4), eight((u32)(matrix >> 32 & 0x3fff) << 4), columns((u32)(matrix >> 16 & 0x3fff) << 4),
        transposed(transposed), widen(widen) {
    if (matrix >> 62 != 1) fail("a matrix that is not swizzled as TMA does");
    at(rank() * WINDOW + swizzled(place(0, 0)));
    at(rank() * WINDOW + swizzled(place(rows - 1, 15) / 16 * 16));
    memory = own_memory() - START;
  }
  u32 place(int row, int k) const {
    return transposed ? start + row / 64 * columns + k / 8 * eight + k % 8 * 128 + 2 * (row % 64)
                      : start + row / 8 * eight + row % 8 * 128 + 2 * k;
  }
  float operator()(int row, int k) const {
    const u32 pair = place(row, k);
    unsigned short bits;
    std::memcpy(&bits, memory + swizzled(pair / 16 * 16) + pair % 16, 2);
    return widen(bits);
  }
};

// This thread's sums: of warp w, lane (g, t) = (lane / 4, lane % 4), rows 16 w + g and + 8, of each 8 columns 2 t and + 1.
inline void perform(const Product& p) {
  float (*widen)(u32) = std::strstr(product, ".bf16.bf16") ? Bf16::low : Fp16::low;
  const int thread = index % 128, first_row = thread / 32 * 16 + thread % 32 / 4, first_column = 2 * (thread % 4);
  if (p.registers && std::memcmp(p.registers, p.held, 16)) fail("registers of a product under way have changed");
  auto rows = p.rows;
  if (!p.registers) {
    const Matrix a(p.a, 64, false, widen);
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) rows[half][k] = a(first_row + 8 * half, k);
  }
  const Matrix b(p.b, 2 * p.count, p.transposed, widen);
  if (fault) return;
  for (int i = 0; i < p.count; ++i) {
    float sum = p.add ? p.sums[i] : 0.f;
    const int column = i / 4 * 8 + first_column + i % 2;
    for (int k = 0; k < 16; ++k) sum += rows[i / 2 % 2][k] * b(column, k);
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
    thread.may_go_on = nullptr;
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
      if (self().done || (self().may_go_on && !self().may_go_on(self().awaited))) continue;
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

// All clusters of a launch in a random order; null, or what went wrong. `ranges`: the memory that loads may touch. `name`: of the
// kernel's wgmma.
template <typename Launch>
const char* run_all(const std::function<void()>& body, const Launch& launch, int cluster_blocks, const char* name,
                    const Range* given, int count) {
  std::vector<int> order(launch.blocks / cluster_blocks);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  chance.seed(launch.seed);
  std::shuffle(order.begin(), order.end(), chance);
  ranges.assign(given, given + count);
  fault = nullptr;
  percent_late = launch.percent_late;
  product = name;
  gridDim = {(unsigned)launch.blocks, 1};
  for (int cluster : order) {
    run(body, cluster * cluster_blocks, cluster_blocks, launch.threads, launch.shared_bytes);
    if (fault) break;
  }
  return fault;
}

// Of a block or a warp in a cluster, what emulation.h has for the threads of a single block.

inline void meet_block() { meet_at(block().all); }
inline void meet_warp() { meet_at(warp().barrier); }
template <typename Value>
Value shuffle_xor(u32, Value value, int offset) {
  Warp& w = warp();
  const int lane = index % LANES;
  std::memcpy(w.values[lane], &value, 4);
  meet_at(w.barrier);
  std::memcpy(&value, w.values[lane ^ offset], 4);
  meet_at(w.barrier);
  return value;
}
inline bool any_lane(bool v) {
  Warp& w = warp();
  w.values[index % LANES][0] = v;
  meet_at(w.barrier);
  const bool any = std::any_of(w.values, w.values + LANES, [](const auto& values) { return values[0] != 0; });
  meet_at(w.barrier);
  return any;
}
// a is in the registers of a warp's lanes: (g, t) holds of rows g and g + 8 inputs 2 t, 2 t + 1 and 8 more.
inline void multiply_registers(float* sums, int count, const u32* registers, u64 b, bool add) {
  Product p{sums, count, 0, b, add, registers, {}, {}, true};
  std::memcpy(p.held, registers, 16);
  Warp& w = warp();
  const int lane = index % LANES;
  std::memcpy(w.values[lane], registers, 16);
  meet_at(w.barrier);
  const bool bf16 = std::strstr(product, ".bf16");
  for (int t = 0; t < 4; ++t)
    for (int i = 0; i < 4; ++i) {
      const u32 pair = w.values[lane / 4 * 4 + t][i];
      float* const row = p.rows[i % 2].data() + i / 2 * 8 + 2 * t;
      row[0] = bf16 ? Bf16::low(pair) : Fp16::low(pair);
      row[1] = bf16 ? Bf16::high(pair) : Fp16::high(pair);
    }
  meet_at(w.barrier);
  self().products.back().push_back(p);
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
inline void send(u32 there, float4 v, u32 barrier_there) {
  emulation::cluster::barrier_at(barrier_there);
  emulation::cluster::loads.push_back({{}, {}, there, barrier_there, true, v});
}
inline void arrive_in_cluster(u32 barrier_there) { arrive(barrier_there); }
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

inline void meet_group(int group) {
  auto& barrier = emulation::cluster::block().groups[group];
  barrier.size = GROUP_THREADS;
  emulation::cluster::meet_at(barrier);
}
inline void store_zeros(u32 shared) { std::memset(emulation::cluster::at(shared), 0, 16); }
inline void show_to_products() {}

inline void load_weights(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  emulation::cluster::ask(shared, map, {k, row, 0, 0}, 3, barrier);
}
inline void load_rows(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  emulation::cluster::check_waited();
  emulation::cluster::ask(shared, map, {k, row, 0, 0}, 2, barrier);
}
inline void load_queries(u32 shared, const TensorMap& map, int d, int head, int row, u32 barrier) {
  emulation::cluster::check_waited();
  emulation::cluster::ask(shared, map, {d, head, row, 0}, 3, barrier);
}
inline void load_page(u32 shared, const TensorMap& map, int d, int key, int head, int unit, u32 barrier) {
  emulation::cluster::check_waited();
  if (map.box[2] != 1 || map.box[3] != 1) emulation::fail("a box of several heads or units");
  emulation::cluster::ask(shared, map, {d, key, head, unit}, 4, barrier);
}
inline void fetch_map(const TensorMap&) {}

template <int COUNT>
void multiply_matrices(float (&d)[COUNT], u64 a, u64 b, int add) {
  using namespace emulation::cluster;
  if (std::atoi(product + 4) != 2 * COUNT) emulation::fail("a wgmma with another number of sums");  // m64n...
  self().products.back().push_back({d, COUNT, a, b, add != 0});
}
inline void multiply_scores(float (&s)[32], u64 queries, u64 keys, int add) {
  emulation::cluster::self().products.back().push_back({s, 32, queries, keys, add != 0});
}
inline void multiply_values(float (&o)[128], const u32* weights, u64 values, int add) {
  emulation::cluster::multiply_registers(o, 128, weights, values, add != 0);
}
inline void begin_products() {}
inline void commit_products() { emulation::cluster::self().products.emplace_back(); }
template <int PENDING>
void wait_for_products() {
  auto& groups = emulation::cluster::self().products;
  for (; groups.size() > PENDING + 1; groups.pop_front())
    for (const auto& product : groups.front()) emulation::cluster::perform(product);
}
template <typename Value, int COUNT>
void hold(Value (&)[COUNT]) {}
inline float quick_exp2(float v) { return std::exp2(v); }
inline int of_warp(int v) { return v; }
inline bool of_any_lane(bool v) { return emulation::cluster::any_lane(v); }

template <int COUNT>
void take_registers() {}
template <int COUNT>
void give_registers() {}
