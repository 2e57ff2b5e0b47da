#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace orion {
namespace {

constexpr const char* kNames[] = {"NONE", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"};

Level read_level() {
  const char* text = std::getenv("ORION_LOG_LEVEL");
  if (!text) return Level::Warn;
  for (int i = 0; i < 6; ++i) {
    const char digit[] = {static_cast<char>('0' + i), 0};
    if (!std::strcmp(text, kNames[i]) || !std::strcmp(text, digit)) return static_cast<Level>(i);
  }
  std::fprintf(stderr, "orion: ORION_LOG_LEVEL=%s is none of NONE, ERROR, WARN, INFO, DEBUG, TRACE, 0 to 5\n", text);
  return Level::Warn;
}

}  // namespace

bool logs(Level level) {
  static const Level most = read_level();
  return level <= most;
}

void log(Level level, const char* format, ...) {
  if (!logs(level)) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "orion %s: %s\n", kNames[static_cast<int>(level)], line);  // one call: lines do not mix
}

}  // namespace orion
