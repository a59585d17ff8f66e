// Threads that share the items of one task at a time.
//
// Threads take a few items at a time, so a thread on a faster core does more; which thread computes an item never changes
// its result. Helpers spin for some microseconds, the length of the gaps within a forward pass, and then sleep: cores are
// shared with other processes. The thread that shared a task waits at most for the last items, and yields meanwhile.
// A task that finds no memory ends the process: a helper thread has no caller to report to.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace segue {

class Team {
public:
    explicit Team(int threads) {
        try {
            for (int number = 1; number < threads; number++) helpers_.emplace_back([this] { help(); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    // task(item) for every item below `items`, on any thread in any order; returns when all are done.
    template <class Task>
    void share(int items, const Task& task) {
        if (items <= 1 || helpers_.empty()) {
            for (int item = 0; item < items; item++) task(item);
            return;
        }
        next_ = 0;
        items_ = items;
        context_ = &task;
        run_ = [](const void* context, int item) { (*static_cast<const Task*>(context))(item); };
        open_ = true;
        call();
        take_items();
        open_ = false;
        for (int turns = 0; inside_ != 0; turns++)  // some helper still computes its last item
            if (turns < LOOKS) pause();
            else std::this_thread::yield();  // the last helper needs a core, and this may be the only one
    }

private:
    static constexpr int LOOKS = 2000;

    void end() {
        ending_ = true;
        call();
        for (auto& helper : helpers_) helper.join();
    }

    void call() {
        calls_++;
        calls_.notify_all();
    }

    // Neighbours together, fewer and fewer of them: what one item leaves in a core's cache helps the next.
    void take_items() {
        const int threads = (int)helpers_.size() + 1;
        for (int first = next_; first < items_;) {
            const int end = first + std::max(1, (items_ - first) / (2 * threads));
            if (!next_.compare_exchange_weak(first, end)) continue;
            for (int item = first; item < end; item++) run_(context_, item);
            first = next_;
        }
    }

    void help() {
        unsigned seen = 0;
        while (!ending_) {
            for (int looks = 0; looks < LOOKS && calls_ == seen; looks++) pause();
            calls_.wait(seen);
            seen = calls_;
            inside_++;  // from here on `share` waits for us, unless it had closed before
            if (open_) take_items();
            inside_--;
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    std::atomic<unsigned> calls_{0};
    std::atomic<bool> ending_{false}, open_{false};
    std::atomic<int> next_{0}, inside_{0};
    int items_ = 0;
    const void* context_ = nullptr;
    void (*run_)(const void*, int) = nullptr;
    std::vector<std::thread> helpers_;
};

}  // namespace segue
