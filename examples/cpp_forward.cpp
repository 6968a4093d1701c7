// SPDX-License-Identifier: Apache-2.0
/* Forward from C++17: errors as exceptions, memory freed by its owner. How to build it is in
 * docs/raw_pointers.md.
 */
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "csa_runtime.h"

namespace {

void check(int status, const std::string &what) {
  if (status != CSA_OK) throw std::runtime_error(what + ": " + csa_last_error());
}

/* A function of the driver, which throws where it fails. */
template <typename... Arguments>
class Function {
 public:
  explicit Function(const char *name) : name_(name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr)
      throw std::runtime_error(std::string("this example needs an NVIDIA GPU's driver: ") +
                               dlerror());
    function_ = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    if (function_ == nullptr) throw std::runtime_error(std::string(name) + " is not in the driver");
  }

  int unchecked(Arguments... arguments) const { return function_(arguments...); }

  void operator()(Arguments... arguments) const {
    int result = unchecked(arguments...);
    if (result != 0) throw std::runtime_error(name_ + ": CUDA error " + std::to_string(result));
  }

 private:
  std::string name_;
  int (*function_)(Arguments...);
};

/* Device memory, with what the host holds in it. */
template <typename Element>
class Buffer {
 public:
  explicit Buffer(std::vector<Element> values) : host_(std::move(values)) {
    Function<std::uint64_t *, std::size_t>("cuMemAlloc_v2")(&address_, bytes());
    Function<std::uint64_t, const void *, std::size_t>("cuMemcpyHtoD_v2")(address_, host_.data(),
                                                                          bytes());
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { free_.unchecked(address_); }

  Element *device() const { return reinterpret_cast<Element *>(address_); }

  /* Waits for what the default stream was given. */
  const std::vector<Element> &download() {
    Function<void *, std::uint64_t, std::size_t>("cuMemcpyDtoH_v2")(host_.data(), address_,
                                                                    bytes());
    return host_;
  }

 private:
  std::size_t bytes() const { return host_.size() * sizeof(Element); }

  std::vector<Element> host_;
  std::uint64_t address_ = 0;
  Function<std::uint64_t> free_{"cuMemFree_v2"};
};

/* bf16 is the upper half of an fp32. */
float from_bf16(std::uint16_t half) {
  std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

constexpr std::uint16_t ONE = 0x3f80, ZERO = 0;

void run() {
  int device = 0;
  void *context = nullptr;
  Function<unsigned>("cuInit")(0);
  Function<int *, int>("cuDeviceGet")(&device, 0);
  Function<void **, int>("cuDevicePrimaryCtxRetain")(&context, device);
  Function<void *>("cuCtxSetCurrent")(context);

  constexpr int ratio = 128, head_dim = 512, tokens = 1000, rows = tokens / ratio;
  Buffer<std::uint16_t> kv(std::vector(tokens * head_dim, ONE));
  Buffer<std::uint16_t> score(std::vector(tokens * head_dim, ZERO));
  Buffer<std::int32_t> cu_seqlens({0, tokens}), cu_seqlens_comp({0, rows});
  Buffer<std::uint16_t> out(std::vector(rows * head_dim, ZERO));

  csa_args args{};
  args.size = sizeof(args);
  args.ratio = ratio, args.coff = 1, args.dtype = CSA_DTYPE_BF16;
  args.tokens = tokens, args.segments = 1, args.rows = rows, args.head_dim = head_dim;
  args.kv = kv.device(), args.kv_stride = head_dim;
  args.score = score.device(), args.score_stride = head_dim;
  args.cu_seqlens = cu_seqlens.device(), args.cu_seqlens_comp = cu_seqlens_comp.device();
  args.out = out.device(), args.out_stride = head_dim;
  check(csa_forward(&args, nullptr), "csa_forward");

  /* The weighted mean of ones is one. */
  double sum = 0;
  for (std::uint16_t element : out.download()) sum += from_bf16(element);
  std::cout << "mean of out " << sum / (rows * head_dim) << '\n';
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
