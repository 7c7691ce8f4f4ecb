// Shelf packing: pieces lie on their long side, the tallest first, side by side on shelves as wide as the square root of the area.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

struct Piece {
    std::vector<std::pair<int, int>> cells;
    int least_x, least_y, width, height, turns;
};

int main() {
    int n;
    if (std::scanf("%d", &n) != 1) return 1;
    std::vector<Piece> pieces(n);
    long area = 0;
    for (Piece& piece : pieces) {
        int k;
        if (std::scanf("%d", &k) != 1) return 1;
        piece.cells.resize(k);
        for (auto& [x, y] : piece.cells)
            if (std::scanf("%d %d", &x, &y) != 2) return 1;
        auto extent = [&](int turns) {
            int low_x = 1 << 30, low_y = 1 << 30, high_x = -(1 << 30), high_y = -(1 << 30);
            for (auto [x, y] : piece.cells) {
                if (turns) std::tie(x, y) = std::make_pair(y, -x);
                low_x = std::min(low_x, x), high_x = std::max(high_x, x);
                low_y = std::min(low_y, y), high_y = std::max(high_y, y);
            }
            piece.least_x = low_x, piece.least_y = low_y, piece.turns = turns;
            piece.width = high_x - low_x + 1, piece.height = high_y - low_y + 1;
        };
        extent(0);
        if (piece.height > piece.width) extent(1);
        area += long(piece.width) * piece.height;
    }

    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return pieces[a].height > pieces[b].height; });
    const int width = std::max(10, int(std::ceil(std::sqrt(double(area)))));
    std::vector<std::pair<int, int>> place(n);
    int x = 0, y = 0, shelf = 0;
    for (int i : order) {
        if (x + pieces[i].width > width) x = 0, y += shelf, shelf = 0;
        place[i] = {x - pieces[i].least_x, y - pieces[i].least_y};
        x += pieces[i].width;
        shelf = std::max(shelf, pieces[i].height);
    }
    std::printf("%d %d\n", width, y + shelf);
    for (int i = 0; i < n; i++) std::printf("%d %d %d 0\n", place[i].first, place[i].second, pieces[i].turns);
}
