// Packs any rows as the input says, damages the arrays, and gathers. Nothing may crash, all
// instruction sets must agree, and arrays without damage must give the rows.
//
// Input: instruction set (1 byte), threads (1), mode (1), size of elements (1), columns (2), bits
// of codes (1) and of rests (1), shift (1), flags (1), capacity (2), what the stride has in
// addition (1), background (4), the number of breaks (1), then for each break array (1), place (2)
// and difference (1); then the values, and the elements.
#include "common.hpp"
#include "tables/gather.hpp"
#include "tables/pack.hpp"
#include "tables/sum.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxRows = 80;
constexpr std::size_t kArrays = 6;

// Rows, marks, ranks, starts, columns, elements.
struct Arrays {
    std::vector<Buffer> buffers;

    template <class T>
    const T* at(std::size_t i) const {
        return reinterpret_cast<const T*>(buffers[i].data());
    }

    TableRows view(const TableShape& shape) const {
        return {at<uint8_t>(0),
                buffers[0].nbytes() / shape.stride,
                {at<uint32_t>(1), at<uint32_t>(2), at<uint32_t>(3), at<uint16_t>(4), at<uint8_t>(5),
                 buffers[3].nbytes() / 4 - 1, buffers[5].nbytes() / shape.element_nbytes}};
    }

    bool equals(const Arrays& other) const {
        for (std::size_t i = 0; i < kArrays; ++i)
            if (!buffers[i].equals(other.buffers[i])) return false;
        return true;
    }
};

template <class U>
Arrays pack(const TableShape& shape, const Buffer& elements, std::size_t n_rows,
            std::size_t threads, Isa isa) {
    Buffer rows(n_rows * shape.stride, 0xA5);
    std::vector<uint32_t> counts(n_rows);
    const auto lists =
        pack_rows_of<U>(shape, elements.data(), n_rows, rows.data(), counts.data(), threads, isa);
    std::vector<uint32_t> starts{0}, marks((n_rows + 31) / 32), ranks((n_rows + 31) / 32);
    for (std::size_t row = 0; row < n_rows; ++row) {
        if (row % 32 == 0) ranks[row / 32] = static_cast<uint32_t>(starts.size() - 1);
        if (counts[row] == 0) continue;
        marks[row / 32] |= 1u << row % 32;
        starts.push_back(starts.back() + counts[row]);
    }
    std::vector<uint16_t> columns;
    std::vector<uint8_t> exceptions;
    for (const auto& list : lists) {
        columns.insert(columns.end(), list.columns.begin(), list.columns.end());
        exceptions.insert(exceptions.end(), list.elements.begin(), list.elements.end());
    }
    claim(columns.size() == starts.back(), "counts are those of the lists");
    Arrays arrays;
    arrays.buffers.push_back(std::move(rows));
    const auto add = [&](const auto& list) {
        const std::size_t nbytes = list.size() * sizeof(list[0]);
        Buffer buffer(nbytes, 0);
        if (nbytes > 0) std::memcpy(buffer.data(), list.data(), nbytes);
        arrays.buffers.push_back(std::move(buffer));
    };
    add(marks);
    add(ranks);
    add(starts);
    add(columns);
    add(exceptions);
    return arrays;
}

// Bags that begin and end anywhere.
template <class Number>
void run_sums(const TableShape& shape, const TableRows& from, Input numbers, bool broken,
              std::size_t threads, Isa isa) {
    constexpr std::size_t kBags = 5;
    if (from.n_rows == 0) return;
    std::vector<int64_t> ids(2 * from.n_rows), starts(kBags + 1);
    for (int64_t& id : ids)
        id = static_cast<int64_t>(static_cast<uint64_t>(numbers.take(2)) % from.n_rows);
    for (int64_t& start : starts)
        start = static_cast<int64_t>(numbers.take(2) % (2 * ids.size())) -
                static_cast<int64_t>(ids.size() / 2);
    Buffer found(kBags * shape.row_nbytes(), 0xA5), other(kBags * shape.row_nbytes(), 0x5A);
    const auto sum = [&](Buffer& dst, std::size_t n_threads, Isa which) {
        sum_rows_of_bags<Number>(shape, from, ids.data(), ids.size(), starts.data(), kBags,
                                 dst.data(), n_threads, which);
    };
    sum(found, threads, isa);
    sum(other, 1, Isa::kPortable);
    std::sort(starts.begin(), starts.end());  // then it is said which rows a bag has
    sum(found, threads, isa);
    sum(other, 1, Isa::kPortable);
    claim(broken || found.equals(other), "all code paths add up alike");
}

template <class U>
void run_elements(const TableShape& shape, const Buffer& elements, std::size_t n_rows, Input breaks,
                  std::size_t threads, Isa isa) {
    Arrays arrays = pack<U>(shape, elements, n_rows, threads, isa);
    claim(arrays.equals(pack<U>(shape, elements, n_rows, 1, Isa::kPortable)),
          "all code paths pack alike");
    const bool broken = break_buffers(breaks, arrays.buffers);
    const TableRows from = arrays.view(shape);
    Buffer found(elements.nbytes(), 0xA5), other(elements.nbytes(), 0x5A);
    std::vector<int64_t> ids(n_rows);
    for (std::size_t i = 0; i < n_rows; ++i) ids[i] = static_cast<int64_t>(i);
    gather_rows<U>(shape, from, ids.data(), n_rows, found.data(), threads, isa);
    gather_rows<U>(shape, from, ids.data(), n_rows, other.data(), 1, Isa::kPortable);
    claim(broken || found.equals(elements), "undamaged arrays give the rows");
    claim(broken || other.equals(elements), "undamaged arrays give the rows on all paths");
    if constexpr (sizeof(U) == 4) run_sums<Fp32>(shape, from, breaks, broken, threads, isa);
    if constexpr (sizeof(U) == 2) run_sums<Bf16>(shape, from, breaks, broken, threads, isa);
}

void run(Input input) {
    const Isa isa = choose_isa(input.take(1));
    const std::size_t threads = 1 + input.take(1) % 3;
    TableShape shape{};
    shape.mode = static_cast<TableMode>(input.take(1) % 4);
    shape.element_nbytes = 1u << input.take(1) % 4;
    shape.n_columns = 1 + input.take(2) % 300;
    shape.code_bits = input.take(1) % 9;
    shape.rest_bits = input.take(1) % 65;
    shape.shift = input.take(1) % 65;
    const uint32_t flags = input.take(1);
    shape.has_sign = (flags & 1) != 0;
    shape.has_row_value = (flags & 2) != 0;
    shape.has_triples = (flags & 4) != 0;
    shape.capacity = input.take(2) % 301;
    const std::size_t more = input.take(1) % 3;
    const uint64_t every_bit =
        shape.element_nbytes == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * shape.element_nbytes) - 1;
    shape.background = input.take(4) & every_bit;
    if (!shape.is_sparse()) shape.capacity = 0, shape.background = 0;
    shape.stride = round_up(shape.content_nbytes(), kTableStrideAlignment) + 32 * more;
    if (!shape.fits()) return;
    Buffer given(std::min<std::size_t>(4 * input.take(1), input.nbytes()));
    input.take_bytes(given.data(), given.nbytes());
    with_elements(shape.element_nbytes, [&]<class U>() {
        const auto outside = static_cast<U>(~TableElements<U>(shape).rest_mask());
        for (std::size_t i = 0; i < std::size_t{1} << shape.code_bits; ++i) {
            uint64_t value = 0;
            input.take_bytes(reinterpret_cast<uint8_t*>(&value), sizeof(U));
            shape.values[i] = value & outside;
            if (shape.has_triples && i >= kTripleCodes) shape.values[i] = shape.values[0];
        }
        const std::size_t n_rows = std::min(input.nbytes() / shape.row_nbytes(), kMaxRows);
        Buffer elements(n_rows * shape.row_nbytes(), 0, 1);
        input.take_bytes(elements.data(), elements.nbytes());
        run_elements<U>(shape, elements, n_rows, Input(given.data(), given.nbytes()), threads, isa);
    });
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
