#pragma once

namespace mooncake {

// ASCII only, whatever the locale.
inline char to_lower(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter; }

}  // namespace mooncake
