// An accelerator that is not there: two devices on host memory, behind torch's key for backends of others.
//
// It computes with torch's CPU kernels, refuses what a CUDA device would refuse, fills fresh memory with junk, counts
// the bytes of each device up to a limit, and writes down kernels, what the host would wait for, and copies to the
// device, one event per line.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/item.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <string>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
using torch::jit::Stack;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int COUNT = 2;
constexpr size_t HEADER = 64;  // in front of every allocation: its size and device
constexpr int JUNK = 0x7f;     // large numbers, or NaN, in every dtype

thread_local c10::DeviceIndex current = 0;

// --- events ---------------------------------------------------------------------------------------------------------

bool recording = false;
std::string events;

void note(const char* kind, const std::string& what) {
  if (recording) events.append(kind).append(" ").append(what).append("\n");
}

// --- memory ---------------------------------------------------------------------------------------------------------

struct Memory {
  int64_t used = 0, peak = 0, limit = int64_t(16) << 30;
};
std::array<Memory, COUNT> memories;

struct DeviceAllocator final : at::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(TYPE, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Memory& memory = memories[current];
    const auto wanted = static_cast<int64_t>(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, memory.used + wanted <= memory.limit, "device out of memory. Tried to allocate ",
                     wanted, " bytes; ", memory.limit - memory.used, " of ", memory.limit, " are free");
    auto* raw = static_cast<char*>(std::aligned_alloc(HEADER, HEADER + (bytes + HEADER - 1) / HEADER * HEADER));
    std::memcpy(raw, &wanted, sizeof wanted);
    raw[sizeof wanted] = static_cast<char>(current);
    std::memset(raw + HEADER, JUNK, bytes);
    memory.used += wanted;
    memory.peak = std::max(memory.peak, memory.used);
    return {raw + HEADER, raw, &release, device};
  }
  static void release(void* context) {
    if (context == nullptr) return;
    auto* raw = static_cast<char*>(context);
    int64_t bytes = 0;
    std::memcpy(&bytes, raw, sizeof bytes);
    memories[raw[sizeof bytes]].used -= bytes;
    std::free(raw);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is not the data
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator allocator;

// --- what torch asks of a backend -----------------------------------------------------------------------------------

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  DeviceGuardImpl() = default;
  explicit DeviceGuardImpl(c10::DeviceType) {}
  c10::DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return {TYPE, current}; }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "invalid device ordinal: there are ", COUNT, " devices, asked for ", device);
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream stream(Device device) const {
    return c10::Stream(c10::Stream::DEFAULT, {TYPE, device.index() < 0 ? current : device.index()});
  }
  c10::Stream getStream(Device device) const override { return stream(device); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream other) const override { return stream(other.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeStream(const c10::Stream&) const override { note("wait", "synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { note("wait", "synchronize"); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { DeviceGuardImpl().setDevice({TYPE, index}); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto made = allocator.allocate(bytes);
    std::memcpy(made.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
};

// --- device memory as tensors of the CPU ----------------------------------------------------------------------------

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

Tensor host_view(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

Tensor empty_like_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void resize_to(const Tensor& tensor, c10::IntArrayRef size) {
  c10::DeviceGuard guard(tensor.device());
  at::native::resize_(tensor, size);
}

Tensor to_device(const Tensor& host, Device device) {
  Tensor made = empty_like_strided(host.sizes(), host.strides(), host.scalar_type(), device);
  host_view(made).copy_(host);
  return made;
}

// --- what an accelerator refuses, and what the host waits for -------------------------------------------------------

// beside the operators tagged as pointwise, those that take a number on the host where a tensor may stand
const std::unordered_set<std::string> TAKES_NUMBERS = {
    "aten::fill_", "aten::masked_fill_", "aten::index_fill_", "aten::_index_put_impl_", "aten::addcmul", "aten::addcdiv"};
const std::unordered_set<std::string> INDEXES = {"aten::index", "aten::_unsafe_index", "aten::_index_put_impl_"};
const std::unordered_set<std::string> NO_WHOLE_NUMBERS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm",
                                                          "aten::addmv", "aten::dot"};
const std::unordered_set<std::string> WAITED_FOR = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::multinomial", "aten::histc", "aten::_linalg_solve_ex", "aten::linalg_eigh",
    "aten::_linalg_eigh", "aten::linalg_lu_factor_ex", "aten::linalg_cholesky_ex", "aten::linalg_inv_ex", "aten::_linalg_svd",
    "aten::geqrf"};

struct Call {
  const c10::FunctionSchema& schema;
  const c10::OperatorHandle& op;
  std::vector<Device> devices;
  std::string on_host;  // arguments that are not numbers, and not on a device
  bool whole_numbers = false, mask = false, host_index = false;

  void look(const Tensor& tensor, size_t place, bool listed) {
    if (!tensor.defined()) return;
    const std::string& name = schema.name();
    const bool index = listed && INDEXES.count(name) > 0;
    mask = mask || (index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte));
    if (on_device(tensor)) {
      devices.push_back(tensor.device());
      whole_numbers = whole_numbers || c10::isIntegralType(tensor.scalar_type(), true);
    } else if (index) {  // indices on the host are sent to the device
      host_index = true;
    } else if (!number(tensor)) {
      on_host += " " + schema.arguments()[place].name();
    }
  }

  bool number(const Tensor& tensor) const {  // of Python, or a tensor without dimensions where one may stand
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return true;
    return tensor.dim() == 0 && (op.hasTag(at::Tag::pointwise) || TAKES_NUMBERS.count(schema.name()));
  }

  void check() const {
    const auto& name = schema.name();
    const bool one = std::all_of(devices.begin(), devices.end(), [&](Device d) { return d == devices[0]; });
    TORCH_CHECK(one, "Expected all tensors to be on the same device: ", name, " got tensors of two devices");
    TORCH_CHECK(devices.empty() || on_host.empty(), "Expected all tensors to be on the same device: ", name, ".",
                schema.overload_name(), " got on the host:", on_host);
    TORCH_CHECK(!whole_numbers || !NO_WHOLE_NUMBERS.count(name), name, " is not implemented for whole numbers");
  }
};

bool fills_a_mask(const Stack& arguments) {  // x[mask] = number: no index is made
  return arguments[2].toTensor().numel() == 1 && !arguments[3].toBool();
}

bool of_unknown_size(const c10::FunctionSchema& schema, const Stack& arguments) {  // repeats on the device
  return schema.name() == "aten::repeat_interleave" && arguments.back().isNone();
}

void write_down(const Call& call, const Stack& arguments) {
  if (!recording) return;
  const auto& name = call.schema.name();
  std::string what = name.substr(name.find("::") + 2);
  note("kernel", what);
  const bool masked = name == "aten::_index_put_impl_" && call.mask && !fills_a_mask(arguments);  // others: nonzero
  if (WAITED_FOR.count(name) || masked || of_unknown_size(call.schema, arguments)) note("wait", what);
  if (call.host_index) note("copy", what);
}

// --- every operator, on the memory of the device --------------------------------------------------------------------

struct Translation {
  std::vector<std::pair<Tensor, Tensor>> views;  // of the device, of the host

  Tensor to_host(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    views.emplace_back(tensor, host_view(tensor));
    return views.back().second;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == TYPE) return Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(to_host(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        made.push_back(tensor.has_value() ? std::optional<Tensor>(to_host(*tensor)) : std::nullopt);
      return made;
    }
    return value;
  }

  Tensor from_host(const Tensor& tensor, Device device) const {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& [mine, view] : views) {
      if (view.is_same(tensor)) return mine;
      if (tensor.numel() && view.storage().data() == tensor.storage().data())
        return at::as_strided(mine, tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    return to_device(tensor, device);
  }

  void grown() const {  // results that were given too small
    for (const auto& [mine, view] : views) {
      if (view.sizes() == mine.sizes()) continue;
      resize_to(mine, view.sizes());
      host_view(mine).copy_(view);
    }
  }
};

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  Call call{schema, op, {}, {}};
  Device device(TYPE, current);
  for (size_t place = 0; place < count; place++) {
    const IValue& value = arguments[place];
    if (value.isTensor()) call.look(value.toTensor(), place, false);
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) call.look(tensor, place, true);
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        if (tensor.has_value()) call.look(*tensor, place, true);
    if (value.isDevice() && value.toDevice().has_index()) device = value.toDevice();
  }
  call.check();
  if (!call.devices.empty()) device = call.devices[0];
  write_down(call, arguments);

  Translation translation;
  Stack host;
  for (const IValue& value : arguments) host.push_back(translation.to_host(value));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
  translation.grown();
  torch::jit::drop(*stack, count);
  for (const IValue& value : host) {
    if (value.isTensor()) {
      stack->emplace_back(translation.from_host(value.toTensor(), device));
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(translation.from_host(tensor, device));
      stack->emplace_back(std::move(made));
    } else {
      stack->push_back(value);
    }
  }
}

// --- memory, copies and views, which no kernel of the CPU can do ----------------------------------------------------

Device place_of(std::optional<Device> device) {
  return device.has_value() && device->has_index() ? *device : Device(TYPE, current);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_like_strided(size, stride, c10::dtype_or_default(dtype), place_of(device));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  if (source.numel()) note(target.is_cpu() ? "wait" : source.is_cpu() ? "copy" : "kernel", "copy_");
  const Tensor to = target.is_cpu() ? target : host_view(target);
  to.copy_(source.is_cpu() ? source : host_view(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) resize_to(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  note("wait", "item");
  return host_view(tensor).item();
}

Tensor as_strided(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, size, stride, offset);
}

Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::as_strided(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), t.storage_offset());
}

const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  resize_to(t, C10_AS_INTARRAYREF_SLOW(size));
  return t;
}

Tensor& set_storage(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}

Tensor& set_whole_storage(Tensor& t, at::Storage storage) {
  const int64_t size = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return set_storage(t, std::move(storage), 0, {size}, {1});
}

// one kernel, as on every accelerator; with gradients by its parts
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool causal, std::optional<double> scale, bool grouped) {
  Translation translation;
  for (const Tensor& other : {key, value, mask.value_or(query)})
    TORCH_CHECK(other.device() == query.device(), "Expected all tensors to be on the same device: attention got ",
                query.device(), " and ", other.device());
  note("kernel", "scaled_dot_product_attention");
  auto shown = mask.has_value() ? std::optional<Tensor>(host_view(*mask)) : std::nullopt;
  return to_device(at::scaled_dot_product_attention(host_view(query), host_view(key), host_view(value), shown, dropout,
                                                    causal, scale, grouped),
                   query.device());
}

Tensor attention_with_gradients(const Tensor& query, const Tensor& key, const Tensor& value,
                                const std::optional<Tensor>& mask, double dropout, bool causal,
                                std::optional<double> scale, bool grouped) {
  const bool gradients = query.requires_grad() || key.requires_grad() || value.requires_grad();
  if (at::GradMode::is_enabled() && gradients)
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, std::nullopt,
                                                              scale, grouped));
  at::AutoDispatchBelowADInplaceOrView below;
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

}  // namespace

REGISTER_ALLOCATOR(TYPE, &allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("scaled_dot_product_attention", attention);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", attention_with_gradients);
}

extern "C" {

void install() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }

int device_count() { return COUNT; }

int current_device() { return current; }

void set_device(int index) { DeviceGuardImpl().uncheckedSetDevice({TYPE, static_cast<c10::DeviceIndex>(index)}); }

int64_t used_bytes(int index) { return memories[index].used; }

int64_t peak_bytes(int index) { return memories[index].peak; }

void reset_peak(int index) { memories[index].peak = memories[index].used; }

int64_t limit_bytes(int index) { return memories[index].limit; }

void set_limit(int index, int64_t bytes) { memories[index].limit = bytes; }

void record(int on) { recording = on != 0; }

const char* take_events() {
  static std::string taken;
  taken.swap(events);
  events.clear();
  return taken.c_str();
}
}
