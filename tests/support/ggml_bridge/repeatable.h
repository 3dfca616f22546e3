// Included before test-backend-ops.cpp: a case has the same data in each run with the same seed.
//
// The test draws its data from std::random_device, in threads of a number that depends on the machine, and with
// generators that live as long as a thread does. Here the device counts on from a seed, which the bridge sets
// before each case; there is one thread; and each generator lives as long as its tensor is filled.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <sstream>
#include <thread>

#include <ggml.h> // aligns memory in another way under the name below

namespace repeatable {

inline std::uint64_t state;

struct Device { // as std::random_device is used: drawn from, and asked for its range
    using result_type = unsigned;

    static constexpr unsigned min() { return 0; }
    static constexpr unsigned max() { return ~0u; }

    unsigned operator()() // SplitMix64, as near seeds must give far ones
    {
        std::uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return static_cast<unsigned>((z ^ (z >> 31)) >> 32);
    }
};

} // namespace repeatable

extern "C" void repeatable_seed(std::uint64_t seed)
{
    repeatable::state = seed;
    std::srand(static_cast<unsigned>(seed));
}

namespace std {
using repeatable_device = repeatable::Device;
}

#define random_device repeatable_device
#define thread_local
#define ggml_quantize_free() ((void)0) // tables that take seconds to make serve all calls of main
#define __EMSCRIPTEN__ 1 // where the test fills tensors in one thread
