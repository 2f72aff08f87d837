// Packs any matrix, damages the arrays as the input says, checks them and unpacks them. Nothing may
// crash, all instruction sets must agree, and arrays without damage must give the matrix.
//
// Input: instruction set (1 byte), format and threads (1), columns (2), the number of breaks (1),
// then for each break array (1), place (2) and difference (1); then the elements.
#include "common.hpp"
#include "rows/weights_pack.hpp"
#include "rows/weights_unpack.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxRows = 64;
constexpr std::size_t kArrays = 5;

struct Matrix {
    Buffer elements;
    std::size_t n_rows;
    std::size_t n_columns;
};

// Low bytes, high bits, first exponents, starts, exceptions.
struct Arrays {
    std::vector<Buffer> buffers;
    std::size_t n_rows;

    PackedWeights view() const {
        return {buffers[0].data(),      buffers[1].data(), buffers[2].data(),
                buffers[3].data(),      buffers[4].data(), n_rows,
                buffers[4].nbytes() / 4};
    }
    bool equals(const Arrays& other) const {
        for (std::size_t i = 0; i < kArrays; ++i)
            if (!buffers[i].equals(other.buffers[i])) return false;
        return true;
    }
};

template <class Form>
Arrays pack(const Matrix& matrix, std::size_t threads, Isa isa) {
    const std::size_t n = matrix.n_rows;
    const WeightShape<Form> shape(matrix.n_columns);
    Buffer low(n * shape.n_padded, 0xA5), high(n * shape.n_high_bytes, 0xA5), firsts(n, 0xA5);
    std::vector<int32_t> counts(n);
    const auto lists =
        pack_weights<Form>(matrix.elements.data(), n, matrix.n_columns,
                           {low.data(), high.data(), firsts.data(), counts.data()}, threads, isa);
    std::vector<int32_t> listed;
    for (const auto& list : lists) listed.insert(listed.end(), list.begin(), list.end());
    Buffer starts(4 * (n + 1), 0, 1), exceptions(4 * listed.size(), 0, 1);
    for (std::size_t row = 0, end = 0; row < n; ++row) {
        end += static_cast<std::size_t>(counts[row]);
        store(starts.data() + 4 * (row + 1), static_cast<int32_t>(end));
    }
    if (!listed.empty()) std::memcpy(exceptions.data(), listed.data(), exceptions.nbytes());
    claim(count_weight_exceptions<Form>(matrix.elements.data(), n, matrix.n_columns, 1, threads,
                                        isa) == listed.size(),
          "the number of exceptions equals the count");
    Arrays arrays{{}, n};
    for (Buffer* buffer : {&low, &high, &firsts, &starts, &exceptions})
        arrays.buffers.push_back(std::move(*buffer));
    return arrays;
}

template <class Form>
void run_form(const Matrix& matrix, Input breaks, std::size_t threads, Isa isa) {
    Arrays arrays = pack<Form>(matrix, threads, isa);
    claim(arrays.equals(pack<Form>(matrix, 1, Isa::kPortable)), "all code paths pack alike");
    const bool broken = break_buffers(breaks, arrays.buffers);
    const std::size_t n_rows = matrix.n_rows, n_columns = matrix.n_columns;
    const WeightCheck check = check_weights<Form>(arrays.view(), n_columns, isa);
    const WeightCheck other = check_weights<Form>(arrays.view(), n_columns, Isa::kPortable);
    claim(check.fault == other.fault && check.row == other.row && check.place == other.place &&
              check.found == other.found,
          "all code paths find the same fault");
    Buffer whole(2 * n_rows * n_columns, 0xA5, 1), again(2 * n_rows * n_columns, 0x5A);
    const std::size_t row =
        unpack_weights<Form>(arrays.view(), n_columns, 0, n_rows, whole.data(), threads, isa);
    const std::size_t again_row =
        unpack_weights<Form>(arrays.view(), n_columns, 0, n_rows, again.data(), 1, Isa::kPortable);
    claim((row == n_rows) == (again_row == n_rows), "all code paths unpack, or all refuse");
    if (check.fault != WeightFault::kNone) return claim(broken, "packed arrays pass the check");
    claim(row == n_rows && whole.equals(again), "all code paths unpack arrays that pass the check");
    claim(broken || whole.equals(matrix.elements), "undamaged arrays give the matrix");
}

void run(Input input) {
    const Isa isa = choose_isa(input.take(1));
    const uint32_t choice = input.take(1);
    const std::size_t n_columns = 1 + input.take(2) % 700;
    Buffer given(std::min<std::size_t>(4 * input.take(1), input.nbytes()));
    input.take_bytes(given.data(), given.nbytes());
    const std::size_t n_rows = std::min(input.nbytes() / 2 / n_columns, kMaxRows);
    Matrix matrix{Buffer(2 * n_rows * n_columns, 0, 1), n_rows, n_columns};
    input.take_bytes(matrix.elements.data(), matrix.elements.nbytes());
    const Input breaks(given.data(), given.nbytes());
    const std::size_t threads = 1 + (choice >> 1) % 3;
    if (choice & 1) return run_form<W11>(matrix, breaks, threads, isa);
    run_form<W12>(matrix, breaks, threads, isa);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
