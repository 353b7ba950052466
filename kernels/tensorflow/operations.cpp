// Operations of TensorFlow: one takes a gradient for its bucket, one hands out its sum. They are built into a library
// of their own, hvd_deepreduce/_tensorflow-<version>.so, where TensorFlow is there at installation (setup.py).
//
// A unit has the gradients of one tape or optimizer in one graph; a slot is one of them. Before each run, Python says in
// which bucket each slot is (dr_tf_lay_out). Then TensorFlow's threads come with gradients (put), which stay where they
// are, and with the carriers that Horovod has reduced (take). Two things are told to Python, by a callback: that all
// gradients of a bucket are there, which Python takes then (dr_tf_gradients), and that all of them are asked for. No
// operation waits on a thread: take ends when Python delivers the bucket.
//
// In a dense run (dr_tf_dense), put hands out the gradient in place of a carrier, with what was left of earlier ones
// added, and take what Horovod has made of it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/cpu.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// A smaller result is copied: it does not keep the memory of its whole bucket, and need not be aligned in it.
constexpr size_t LEAST_VIEW_BYTES = 65536;
constexpr size_t ALIGNMENT = 64;

enum Event { FULL = 1, WANTED = 2, HELD = 3 };
// (event, unit, bucket, run, carrier, flag). WANTED: whether all carriers are this one.
typedef void (*Listener)(int, int64_t, int64_t, int64_t, double, int);
Listener listener = nullptr;

const char GONE[] = "the DeepReduce of this function does not exist any more: create a new one on every rank, with a new "
                    "optimizer or tape";
const char AGAIN[] = "a function was run again before its previous run had ended: run it again after its results are there";

struct Waiting {
    OpKernelContext* context = nullptr;  // null: nobody waits
    AsyncOpKernel::DoneCallback done;
    CancellationToken token = 0;
    double carrier = 0;
};

struct Slot {
    int64_t bucket = -1, begin = 0, numel = 0;
    bool came = false;
    Tensor gradient;  // until Python takes it
    TensorShape shape;
    void* residual = nullptr;  // of a dense run: what is to be added to the gradient, of its dtype and size
    bool flushed = false;      // it was
    Waiting waiting;
};

struct Bucket {
    int64_t members = 0, ready = 0, wanted = 0;
    double carrier = 0;  // of those that are wanted
    bool equal = true;   // it is that of all of them

    // A gradient of it has come: whether all have now.
    bool count_ready() { return ++ready == members; }
    // A sum is asked for: whether all are now.
    bool count_wanted(double of_slot) {
        equal = equal && (wanted == 0 || of_slot == carrier);
        carrier = of_slot;
        return ++wanted == members;
    }
};

struct Unit {
    std::mutex mutex;
    int64_t id = 0, run = 0, came = 0;
    bool dense = false;
    std::vector<Slot> slots;
    std::vector<Bucket> buckets;
    std::string failure;  // of all further operations
};

// They are never destroyed: threads may still run at the process's end.
std::mutex& units_mutex = *new std::mutex;
std::unordered_map<int64_t, std::shared_ptr<Unit>>& units = *new std::unordered_map<int64_t, std::shared_ptr<Unit>>;
int64_t last_unit = 0;

std::shared_ptr<Unit> find(int64_t id) {
    std::lock_guard<std::mutex> lock(units_mutex);
    auto found = units.find(id);
    return found == units.end() ? nullptr : found->second;
}

// Horovod Elastic goes on after an UnknownError that names its operation, and drops others (tensorflow/failures.py).
absl::Status failed(const std::string& text) {
    auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
    return has("UnknownError") && has("HorovodAllreduce") ? absl::UnknownError(text) : absl::InternalError(text);
}

// Why the operation of a slot cannot go on, if it cannot. came: whether its gradient must have come. With the mutex held.
absl::Status check(const Unit& unit, int64_t at, int64_t run, bool came) {
    if (!unit.failure.empty()) return failed(unit.failure);
    const bool now = at < (int64_t)unit.slots.size() && run == unit.run && unit.slots[at].came == came;
    return now ? absl::OkStatus() : failed(AGAIN);
}

absl::Status check_size(const Tensor& gradient, int64_t numel, const char* other) {
    if (gradient.NumElements() == numel) return absl::OkStatus();
    return failed("a gradient has " + std::to_string(gradient.NumElements()) + " elements, and its " + other + " " +
                  std::to_string(numel));
}

// Calls a function with a zero of the type of a carrier.
template <class Function>
auto with_type(DataType dtype, Function function) {
    switch (dtype) {
        case tensorflow::DT_HALF: return function(Eigen::half());
        case tensorflow::DT_FLOAT: return function(0.0f);
        default: return function(0.0);
    }
}

// The gradient of a dense run, as Horovod reduces it: out = gradient + residual, if all of it is finite in the dtype of
// out. The residual keeps what that rounds off. Otherwise out = gradient. Returns whether the residual was added.
template <class Out, class T>
bool add_residual(Out* out, const T* gradient, T* residual, int64_t count) {
    bool finite = residual != nullptr;
    for (int64_t i = 0; finite && i < count; ++i) finite = std::isfinite((T)(Out)(gradient[i] + residual[i]));
    for (int64_t i = 0; i < count; ++i) {
        const T whole = finite ? gradient[i] + residual[i] : gradient[i];
        out[i] = (Out)whole;
        if (finite) residual[i] = whole - (T)out[i];
    }
    return finite;
}
template <class T>
bool add_residual(Tensor* out, const Tensor& gradient, void* residual) {
    return with_type(out->dtype(), [&](auto zero) {
        return add_residual(out->flat<decltype(zero)>().data(), gradient.flat<T>().data(), (T*)residual,
                            gradient.NumElements());
    });
}

// A gradient of a dense run has come: makes the operation's result.
absl::Status put_dense(Unit& unit, int64_t at, int64_t run, OpKernelContext* context) {
    const Tensor& gradient = context->input(0);
    void* residual = nullptr;
    {
        std::lock_guard<std::mutex> lock(unit.mutex);
        TF_RETURN_IF_ERROR(check(unit, at, run, false));
        Slot& slot = unit.slots[at];
        if (slot.residual) TF_RETURN_IF_ERROR(check_size(gradient, slot.numel, "residual"));
        slot.came = true;
        ++unit.came;
        residual = slot.residual;
    }
    if (!residual && gradient.dtype() == context->expected_output_dtype(0)) {
        context->set_output(0, gradient);
        return absl::OkStatus();
    }
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, gradient.shape(), &out));
    const bool added = gradient.dtype() == tensorflow::DT_DOUBLE ? add_residual<double>(out, gradient, residual)
                                                                 : add_residual<float>(out, gradient, residual);
    std::lock_guard<std::mutex> lock(unit.mutex);
    unit.slots[at].flushed = added;
    return absl::OkStatus();
}

// What Horovod has made of a gradient of a dense run.
absl::Status take_dense(Unit& unit, int64_t at, int64_t run, OpKernelContext* context) {
    const Tensor& given = context->input(0);
    {
        std::lock_guard<std::mutex> lock(unit.mutex);
        TF_RETURN_IF_ERROR(check(unit, at, run, true));
        --unit.came;
    }
    if (given.dtype() == context->expected_output_dtype(0)) {
        context->set_output(0, given);
        return absl::OkStatus();
    }
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, given.shape(), &out));
    with_type(given.dtype(), [&](auto zero) {
        const auto from = given.flat<decltype(zero)>();
        if (out->dtype() == tensorflow::DT_DOUBLE) out->flat<double>() = from.template cast<double>();
        else out->flat<float>() = from.template cast<float>();
    });
    return absl::OkStatus();
}

bool is_dense(Unit& unit) {
    std::lock_guard<std::mutex> lock(unit.mutex);
    return unit.dense;
}

absl::Status put(Unit& unit, int64_t at, int64_t run, const Tensor& gradient) {
    Event event = HELD;
    int64_t bucket;
    {
        std::lock_guard<std::mutex> lock(unit.mutex);
        TF_RETURN_IF_ERROR(check(unit, at, run, false));
        Slot& slot = unit.slots[at];
        bucket = slot.bucket;
        if (bucket >= 0) TF_RETURN_IF_ERROR(check_size(gradient, slot.numel, "graph said"));
        slot.came = true;
        slot.shape = gradient.shape();
        slot.gradient = gradient;
        ++unit.came;
        if (bucket >= 0) {
            if (!unit.buckets[bucket].count_ready()) return absl::OkStatus();
            event = FULL;
        } else if (unit.came < (int64_t)unit.slots.size()) {
            return absl::OkStatus();
        }
    }
    listener(event, unit.id, bucket, run, 0, 0);
    return absl::OkStatus();
}

void cancel(const std::shared_ptr<Unit>& unit, int64_t at, OpKernelContext* context) {
    Waiting waiting;
    {
        std::lock_guard<std::mutex> lock(unit->mutex);
        if (at >= (int64_t)unit->slots.size()) return;
        Slot& slot = unit->slots[at];
        if (slot.waiting.context != context) return;  // it was delivered
        std::swap(waiting, slot.waiting);
    }
    context->SetStatus(absl::CancelledError("the step was cancelled"));
    waiting.done();
}

void take(const std::shared_ptr<Unit>& unit, int64_t at, int64_t run, double carrier, OpKernelContext* context,
          AsyncOpKernel::DoneCallback done) {
    CancellationManager* manager = context->cancellation_manager();
    absl::Status status;
    bool wanted = false, equal = false;
    int64_t bucket = -1;
    {
        std::lock_guard<std::mutex> lock(unit->mutex);
        status = check(*unit, at, run, true);
        if (status.ok() && unit->slots[at].waiting.context) status = failed(AGAIN);
        if (status.ok()) {
            Slot& slot = unit->slots[at];
            CancellationToken token = manager ? manager->get_cancellation_token() : 0;
            if (manager && !manager->RegisterCallback(token, [unit, at, context] { cancel(unit, at, context); })) {
                status = absl::CancelledError("the step was cancelled");
            } else {
                slot.waiting = {context, std::move(done), token, carrier};
                bucket = slot.bucket;
                wanted = bucket >= 0 && unit->buckets[bucket].count_wanted(carrier);
                equal = wanted && unit->buckets[bucket].equal;
            }
        }
    }
    if (!status.ok()) {
        context->SetStatus(status);
        done();
    } else if (wanted) {
        listener(WANTED, unit->id, bucket, run, carrier, equal);
    }
}

template <class T>
void scale(T* values, int64_t count, T factor) {
    for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

// Gives a slot's sum to the operation that waits for it.
absl::Status give(const Tensor& sums, const Slot& slot, double factor) {
    const size_t size = sums.dtype() == tensorflow::DT_DOUBLE ? 8 : 4, bytes = slot.numel * size;
    char* from = const_cast<char*>(sums.tensor_data().data()) + slot.begin * size;
    if (factor != 1) {
        if (size == 8) scale(reinterpret_cast<double*>(from), slot.numel, factor);
        else scale(reinterpret_cast<float*>(from), slot.numel, (float)factor);
    }
    if (bytes >= LEAST_VIEW_BYTES && reinterpret_cast<uintptr_t>(from) % ALIGNMENT == 0) {
        Tensor view;
        if (!view.CopyFrom(sums.Slice(slot.begin, slot.begin + slot.numel), slot.shape))
            return failed("the shape of a gradient is not that of its sum");
        slot.waiting.context->set_output(0, view);
        return absl::OkStatus();
    }
    Tensor* out = nullptr;
    absl::Status status = slot.waiting.context->allocate_output(0, slot.shape, &out);
    if (status.ok()) std::memcpy(const_cast<char*>(out->tensor_data().data()), from, bytes);
    return status;
}

void end(const Waiting& waiting, const absl::Status& status) {
    if (CancellationManager* manager = waiting.context->cancellation_manager())
        manager->DeregisterCallback(waiting.token);
    if (!status.ok()) waiting.context->SetStatus(status);
    waiting.done();
}

// An operation of a slot.
template <class Kernel>
class OfSlot : public Kernel {
  public:
    explicit OfSlot(OpKernelConstruction* construction) : Kernel(construction) {
        OP_REQUIRES_OK(construction, construction->GetAttr("unit", &unit_));
        OP_REQUIRES_OK(construction, construction->GetAttr("slot", &slot_));
    }
    bool IsExpensive() override { return false; }  // TensorFlow runs it at once, and not as a task of its own

  protected:
    int64_t unit_, slot_;
};

class Put : public OfSlot<OpKernel> {
  public:
    using OfSlot::OfSlot;
    void Compute(OpKernelContext* context) override {
        auto unit = find(unit_);
        OP_REQUIRES(context, unit, failed(GONE));
        const int64_t run = context->input(1).scalar<int64_t>()();
        if (is_dense(*unit)) {
            OP_REQUIRES_OK(context, put_dense(*unit, slot_, run, context));
            return;
        }
        OP_REQUIRES_OK(context, put(*unit, slot_, run, context->input(0)));
        Tensor* carrier = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({1}), &carrier));
        with_type(carrier->dtype(), [&](auto zero) { carrier->flat<decltype(zero)>()(0) = decltype(zero)(1.0f); });
    }
};

class Take : public OfSlot<AsyncOpKernel> {
  public:
    using OfSlot::OfSlot;
    void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
        auto unit = find(unit_);
        OP_REQUIRES_ASYNC(context, unit, failed(GONE), done);
        const Tensor& given = context->input(0);
        const int64_t run = context->input(1).scalar<int64_t>()();
        if (is_dense(*unit)) {
            OP_REQUIRES_OK_ASYNC(context, take_dense(*unit, slot_, run, context), done);
            done();
            return;
        }
        OP_REQUIRES_ASYNC(context, given.NumElements() == 1, failed("a carrier has one element"), done);
        const double carrier =
            with_type(given.dtype(), [&](auto zero) { return (double)given.flat<decltype(zero)>()(0); });
        take(unit, slot_, run, carrier, context, std::move(done));
    }
};

class All : public OpKernel {
  public:
    explicit All(OpKernelConstruction* construction) : OpKernel(construction) {}
    void Compute(OpKernelContext*) override {}
    bool IsExpensive() override { return false; }
};

}  // namespace

// Put and take do have a state. But they would make Horovod's conditional around them stateful: TensorFlow would then run
// all conditionals in the program's order, and would not replace them by what is in them, although their conditions are
// constants. Their results are read by DeepReduceAll, so that none of them is left out; and no two are the same.
REGISTER_OP("DeepReducePut")
    .Input("gradient: T")
    .Input("run: int64")
    .Output("carrier: carried")
    .Attr("T: {float, double}")
    .Attr("carried: {half, float, double}")
    .Attr("unit: int")
    .Attr("slot: int")
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc("Takes a gradient for its bucket. The carrier is 1; in a dense run it is the gradient.");
REGISTER_OP("DeepReduceTake")
    .Input("carrier: carried")
    .Input("run: int64")
    .Output("sum: T")
    .Attr("T: {float, double}")
    .Attr("carried: {half, float, double}")
    .Attr("unit: int")
    .Attr("slot: int")
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc("The sum of a gradient over all ranks, scaled as its carrier says, when its bucket is there.");
REGISTER_OP("DeepReduceAll")
    .Input("results: T")
    .Attr("T: list(type)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Runs when all results are there, so that they are made whether or not something else reads them.");
REGISTER_KERNEL_BUILDER(Name("DeepReduceAll").Device(tensorflow::DEVICE_CPU), All);
REGISTER_KERNEL_BUILDER(Name("DeepReducePut").Device(tensorflow::DEVICE_CPU), Put);
REGISTER_KERNEL_BUILDER(Name("DeepReduceTake").Device(tensorflow::DEVICE_CPU), Take);

// ---- What Python calls. Nothing is called while the listener runs on the same thread with a lock held.

DR_API void dr_tf_listen(Listener given) { listener = given; }

DR_API int64_t dr_tf_unit_new() {
    auto unit = std::make_shared<Unit>();
    std::lock_guard<std::mutex> lock(units_mutex);
    unit->id = ++last_unit;
    units[unit->id] = unit;
    return unit->id;
}

DR_API void dr_tf_unit_free(int64_t id) {
    std::lock_guard<std::mutex> lock(units_mutex);
    units.erase(id);
}

// Memory of a bucket: that of a tensor, so that results can be views of it.
DR_API void* dr_tf_memory_new(int64_t numel, int itemsize) {
    return new Tensor(itemsize == 8 ? tensorflow::DT_DOUBLE : tensorflow::DT_FLOAT, TensorShape({numel}));
}
DR_API void dr_tf_memory_free(void* memory) { delete (Tensor*)memory; }
DR_API const void* dr_tf_memory_address(const void* memory) { return ((const Tensor*)memory)->tensor_data().data(); }
// Whether no result is a view of it any more.
DR_API int dr_tf_memory_alone(const void* memory) {
    const Tensor& tensor = *(const Tensor*)memory;
    return tensor.NumElements() == 0 || tensor.RefCountIsOne();
}

// A run begins. Returns 1 unless gradients of the last run have come whose sums were not delivered.
DR_API int dr_tf_begin(int64_t id, int64_t run, int64_t slots, int force) {
    auto unit = find(id);
    if (!unit) return 0;
    std::lock_guard<std::mutex> lock(unit->mutex);
    if (unit->came && !force) return 0;
    unit->buckets.clear();
    unit->slots.clear();
    unit->slots.resize(slots);
    unit->run = run;
    unit->came = 0;
    unit->dense = false;
    unit->failure.clear();
    return 1;
}

// The run that has begun is dense. residuals: the addresses of what is to be added to the gradients, 0 for nothing;
// numels: their sizes. They stay until the next run begins. Null: nothing is to be added to any.
DR_API void dr_tf_dense(int64_t id, const int64_t* residuals, const int64_t* numels) {
    auto unit = find(id);
    if (!unit) return;
    std::lock_guard<std::mutex> lock(unit->mutex);
    unit->dense = true;
    for (size_t at = 0; residuals && at < unit->slots.size(); ++at) {
        unit->slots[at].residual = (void*)residuals[at];
        unit->slots[at].numel = numels[at];
    }
}

// The numbers of elements of all slots, once their gradients have come; and which of a dense run's residuals were added.
DR_API void dr_tf_slots(int64_t id, int64_t* numels, uint8_t* flushed) {
    auto unit = find(id);
    if (!unit) return;
    std::lock_guard<std::mutex> lock(unit->mutex);
    for (size_t at = 0; at < unit->slots.size(); ++at) {
        numels[at] = unit->slots[at].gradient.NumElements();
        flushed[at] = unit->slots[at].flushed;
    }
}

// The bucket of each of the slots, of `count` buckets, and the slot's place in it.
DR_API void dr_tf_lay_out(int64_t id, const int64_t* bucket_of, const int64_t* begins, const int64_t* numels,
                          int64_t count) {
    auto unit = find(id);
    if (!unit) return;
    std::vector<int64_t> full;
    std::vector<std::pair<int64_t, Bucket>> wanted;
    int64_t run;
    {
        std::lock_guard<std::mutex> lock(unit->mutex);
        run = unit->run;
        unit->buckets.resize(count);
        for (size_t at = 0; at < unit->slots.size(); ++at) {
            Slot& slot = unit->slots[at];
            slot.bucket = bucket_of[at];
            slot.begin = begins[at];
            slot.numel = numels[at];
            ++unit->buckets[slot.bucket].members;
        }
        for (Slot& slot : unit->slots) {
            if (!slot.came) continue;
            Bucket& bucket = unit->buckets[slot.bucket];
            if (bucket.count_ready()) full.push_back(slot.bucket);
            if (slot.waiting.context && bucket.count_wanted(slot.waiting.carrier))
                wanted.emplace_back(slot.bucket, bucket);
        }
    }
    for (int64_t at : full) listener(FULL, id, at, run, 0, 0);
    for (auto& [at, bucket] : wanted) listener(WANTED, id, at, run, bucket.carrier, bucket.equal);
}

// Takes the gradients of a bucket that is full, and writes their addresses, in the order of the slots. The result keeps
// them until dr_tf_gradients_free.
DR_API void* dr_tf_gradients(int64_t id, int64_t at, uint64_t* addresses) {
    auto* taken = new std::vector<Tensor>;
    if (auto unit = find(id)) {
        std::lock_guard<std::mutex> lock(unit->mutex);
        for (Slot& slot : unit->slots) {
            if (slot.bucket != at) continue;
            *addresses++ = reinterpret_cast<uintptr_t>(slot.gradient.tensor_data().data());
            taken->push_back(std::move(slot.gradient));
        }
    }
    return taken;
}
DR_API void dr_tf_gradients_free(void* taken) { delete (std::vector<Tensor>*)taken; }

// The sums of a bucket are in this memory: gives them to the operations that wait for them. Each is multiplied by its
// carrier / divisor before, unless the divisor is 0. With an error, they fail with it. The bucket -1, with an error: all
// operations of the unit's run fail, those that wait and those that come.
DR_API void dr_tf_deliver(int64_t id, int64_t run, int64_t at, const void* memory, double divisor, const char* error) {
    auto unit = find(id);
    if (!unit) return;
    std::vector<Slot> slots;
    {
        std::lock_guard<std::mutex> lock(unit->mutex);
        if (at < 0) unit->failure = error;
        else if (unit->run != run || at >= (int64_t)unit->buckets.size()) return;
        for (Slot& slot : unit->slots) {
            if (at >= 0 && slot.bucket != at) continue;
            if (at >= 0) --unit->came;
            if (!slot.waiting.context) continue;
            slots.push_back(slot);
            slot.waiting = Waiting();
        }
    }
    for (Slot& slot : slots) {
        absl::Status status =
            error ? failed(error) : give(*(const Tensor*)memory, slot, divisor ? slot.waiting.carrier / divisor : 1.0);
        end(slot.waiting, status);
    }
}
