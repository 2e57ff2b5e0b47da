// Lines on stderr, by ORION_LOG_LEVEL.
#pragma once

namespace orion {

enum class Level { None, Error, Warn, Info, Debug, Trace };

bool logs(Level level);
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace orion
