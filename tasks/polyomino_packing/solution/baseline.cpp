// Bottom-left greedy: the largest pieces first, each in the orientation and at the place that ends lowest, then leftmost. Rows of
// the rectangle are bit sets, so that every column of a row is tried at once. Other widths are tried while there is time.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

using Clock = std::chrono::steady_clock;
constexpr double kSeconds = 1.5;  // of the 2 s that a case has
constexpr int kLarge = 6, kDepth = 32;  // pieces from this size on are tried in the uppermost rows only: few holes further down fit
constexpr int kLateDepth = 10;  // all pieces once the time is over, so that there is an answer
using Cell = std::pair<int, int>;

struct Shape {  // a piece in one orientation, least coordinates 0
    int turns, mirror, shift_x, shift_y, width, height;
    std::vector<Cell> cells;
};

struct Place {
    int x, y, shape;
};

struct Packing {
    int width = 0, height = 0;
    std::vector<Place> places;
    double area() const { return double(width) * height; }
};

std::vector<Shape> orientations(const std::vector<Cell>& cells) {
    std::vector<Shape> found;
    std::set<std::vector<Cell>> seen;
    for (int mirror = 0; mirror < 2; mirror++) {
        for (int turns = 0; turns < 4; turns++) {
            std::vector<Cell> turned = cells;
            int low_x = 1 << 30, low_y = 1 << 30;
            for (auto& [x, y] : turned) {
                if (mirror) x = -x;
                for (int k = 0; k < turns; k++) {
                    const int before = x;
                    x = y, y = -before;
                }
                low_x = std::min(low_x, x), low_y = std::min(low_y, y);
            }
            Shape shape{turns, mirror, -low_x, -low_y, 0, 0, {}};
            for (auto [x, y] : turned) {
                shape.cells.emplace_back(x - low_x, y - low_y);
                shape.width = std::max(shape.width, x - low_x + 1);
                shape.height = std::max(shape.height, y - low_y + 1);
            }
            std::sort(shape.cells.begin(), shape.cells.end());
            if (seen.insert(shape.cells).second) found.push_back(shape);
        }
    }
    return found;
}

class Board {
public:
    explicit Board(int width) : width_(width), words_((width + 63) / 64 + 1) {}

    // The leftmost column where the shape fits at row y, or -1.
    int fit(const Shape& shape, int y) {
        grow(y + shape.height);
        for (int first = 0; first + shape.width <= width_; first += 64) {
            uint64_t blocked = 0;
            for (auto [dx, dy] : shape.cells) {
                blocked |= window(y + dy, first + dx);
                if (blocked == ~uint64_t(0)) break;
            }
            if (blocked != ~uint64_t(0)) {
                const int x = first + __builtin_ctzll(~blocked);
                if (x + shape.width <= width_) return x;
            }
        }
        return -1;
    }

    void put(const Shape& shape, int x, int y) {
        for (auto [dx, dy] : shape.cells) {
            row(y + dy)[(x + dx) >> 6] |= uint64_t(1) << ((x + dx) & 63);
            used_[y + dy]++;
        }
        while (lowest_ < int(used_.size()) && used_[lowest_] == width_) lowest_++;
        height_ = std::max(height_, y + shape.height);
    }

    int lowest() const { return lowest_; }  // rows below are full
    int height() const { return height_; }

private:
    uint64_t* row(int y) { return &bits_[size_t(y) * words_]; }

    // 64 columns of a row from column x on.
    uint64_t window(int y, int x) {
        const uint64_t* words = row(y) + (x >> 6);
        const int shift = x & 63;
        return shift ? words[0] >> shift | words[1] << (64 - shift) : words[0];
    }

    void grow(int rows) {
        if (rows > int(used_.size())) {
            used_.resize(rows + 64, 0);
            bits_.resize(used_.size() * words_, 0);
        }
    }

    int width_, words_, lowest_ = 0, height_ = 0;
    std::vector<uint64_t> bits_;
    std::vector<int> used_;
};

// Fills a rectangle of this width. Gives up, with height 0, once it is no better than `worst`, or the time is over and there is
// another answer (`worst` is finite).
Packing pack(const std::vector<std::vector<Shape>>& pieces, const std::vector<int>& order, int width, double worst,
             Clock::time_point end) {
    Board board(width);
    Packing packing{width, 0, std::vector<Place>(pieces.size())};
    bool late = false;
    int placed = 0;
    for (int i : order) {
        if (++placed % 64 == 0 && Clock::now() > end) late = true;
        if (late && std::isfinite(worst)) return {};
        int from = board.lowest();
        if (late) from = std::max(from, board.height() - kLateDepth);
        else if (int(pieces[i][0].cells.size()) >= kLarge) from = std::max(from, board.height() - kDepth);
        int best_top = 1 << 30, best_x = 0, best_y = 0, best_shape = -1;
        for (int y = from; y < best_top; y++) {
            for (size_t s = 0; s < pieces[i].size(); s++) {
                const Shape& shape = pieces[i][s];
                if (y + shape.height > best_top) continue;
                const int x = board.fit(shape, y);
                const int top = y + shape.height;
                if (x >= 0 && (top < best_top || x < best_x)) best_top = top, best_x = x, best_y = y, best_shape = int(s);
            }
        }
        board.put(pieces[i][best_shape], best_x, best_y);
        packing.places[i] = {best_x, best_y, best_shape};
        if (double(width) * board.height() >= worst) return {};
    }
    packing.height = board.height();
    return packing;
}

int main() {
    const auto begin = Clock::now();
    const auto end = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kSeconds));
    int n;
    if (std::scanf("%d", &n) != 1) return 1;
    std::vector<std::vector<Shape>> pieces(n);
    long area = 0;
    for (auto& piece : pieces) {
        int k;
        if (std::scanf("%d", &k) != 1) return 1;
        std::vector<Cell> cells(k);
        for (auto& [x, y] : cells)
            if (std::scanf("%d %d", &x, &y) != 2) return 1;
        piece = orientations(cells);
        area += k;
    }

    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    auto size = [&](int i) { return pieces[i][0].cells.size(); };
    auto box = [&](int i) { return pieces[i][0].width * pieces[i][0].height; };
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return size(a) != size(b) ? size(a) > size(b) : box(a) > box(b); });

    const int square = std::max(10, int(std::ceil(std::sqrt(area * 1.1))));
    Packing best = pack(pieces, order, square, INFINITY, end);
    for (int step = 1; Clock::now() < end && step < 4 * square; step++) {  // square + 1, - 1, + 2, - 2, ...
        const int width = square + (step % 2 ? step + 1 : -step) / 2;
        if (width < 10) continue;
        Packing other = pack(pieces, order, width, best.area(), end);
        if (other.height > 0) best = other;
    }

    std::printf("%d %d\n", best.width, best.height);
    for (int i = 0; i < n; i++) {
        const auto [x, y, s] = best.places[i];
        const Shape& shape = pieces[i][s];
        std::printf("%d %d %d %d\n", x + shape.shift_x, y + shape.shift_y, shape.turns, shape.mirror);
    }
}
